"""Configs in the styles that public projects use. Values are facts of such files; texts are ours.

``FILES[name]`` is a config and the keys that zerofp8 refuses in it, in any order; none: it runs.
"""

REFUSED_BY_DEEPSPEED = {"dropped sections", "apex"}

AUTO = "auto"
_AUTO_BATCH = {"train_batch_size": AUTO, "train_micro_batch_size_per_gpu": AUTO}
_AUTO_ADAMW = {"type": "AdamW", "params": {"lr": AUTO, "betas": AUTO, "eps": AUTO,
                                           "weight_decay": AUTO}}
_AUTO_WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": AUTO, "warmup_max_lr": AUTO,
                                               "warmup_num_steps": AUTO}}
_AUTO_FP16 = {"enabled": AUTO, "loss_scale": 0, "loss_scale_window": 1000,
              "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1}
_STAGE_3 = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9,
            "reduce_bucket_size": AUTO, "stage3_prefetch_bucket_size": AUTO,
            "stage3_param_persistence_threshold": AUTO, "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True}
_CPU = {"device": "cpu", "pin_memory": True}

FILES = {
    "trainer, stage 2": ({
        "fp16": _AUTO_FP16, "bf16": {"enabled": AUTO}, "optimizer": _AUTO_ADAMW,
        "scheduler": _AUTO_WARMUP, **_AUTO_BATCH, "gradient_accumulation_steps": AUTO,
        "gradient_clipping": AUTO, "steps_per_print": 2000, "wall_clock_breakdown": False,
        "zero_optimization": {"stage": 2, "allgather_partitions": True, "reduce_scatter": True,
                              "allgather_bucket_size": 2e8, "overlap_comm": True,
                              "reduce_bucket_size": 2e8, "contiguous_gradients": True}}, ()),
    "trainer, stage 2, state on the CPU": ({
        "fp16": _AUTO_FP16, "optimizer": _AUTO_ADAMW, **_AUTO_BATCH,
        "gradient_accumulation_steps": AUTO, "gradient_clipping": AUTO,
        "zero_optimization": {"stage": 2, "offload_optimizer": _CPU, "reduce_bucket_size": AUTO,
                              "allgather_bucket_size": AUTO, "overlap_comm": True}}, ()),
    "trainer, stage 3": ({
        "bf16": {"enabled": AUTO}, "optimizer": _AUTO_ADAMW, "scheduler": _AUTO_WARMUP,
        "zero_optimization": {**_STAGE_3, "offload_optimizer": _CPU, "offload_param": _CPU},
        **_AUTO_BATCH, "gradient_accumulation_steps": AUTO, "gradient_clipping": AUTO},
        ("/zero_optimization/stage",)),
    "trainer, stage 0": ({**_AUTO_BATCH, "gradient_accumulation_steps": AUTO, "gradient_clipping":
                          AUTO, "zero_allow_untested_optimizer": True, "fp16": _AUTO_FP16,
                          "bf16": {"enabled": AUTO}, "zero_optimization": {
                              "stage": 0, "allgather_partitions": True, "overlap_comm": False,
                              "allgather_bucket_size": 5e8, "reduce_bucket_size": 5e8,
                              "contiguous_gradients": True, "round_robin_gradients": True}}, ()),
    "accelerate, made from its plugin": ({
        **_AUTO_BATCH, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none",
                                                                "nvme_path": None},
                              "offload_param": {"device": "none", "nvme_path": None},
                              "stage3_gather_16bit_weights_on_model_save": False},
        "steps_per_print": float("inf"), "bf16": {"enabled": True}, "fp16": {"enabled": False},
        "zero_allow_untested_optimizer": True}, ()),
    "accelerate, all auto": ({
        **_AUTO_BATCH, "gradient_accumulation_steps": AUTO, "gradient_clipping": AUTO,
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": AUTO},
                              "offload_param": {"device": AUTO}, "overlap_comm": AUTO,
                              "stage3_gather_16bit_weights_on_model_save": AUTO},
        "steps_per_print": float("inf"), "bf16": {"enabled": AUTO}}, ()),
    "a classifier of DeepSpeed's examples": ({
        "train_batch_size": 16, "steps_per_print": 2000, "optimizer": {
            "type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8,
                                       "weight_decay": 3e-7}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001,
                                                     "warmup_num_steps": 1000}},
        "gradient_clipping": 1.0, "prescale_gradients": False, "bf16": {"enabled": False},
        "fp16": {"enabled": True, "fp16_master_weights_and_grads": False, "loss_scale": 0,
                 "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1,
                 "initial_scale_power": 15},
        "wall_clock_breakdown": False, "zero_optimization": {
            "stage": 0, "allgather_partitions": True, "reduce_scatter": True,
            "allgather_bucket_size": 50000000, "reduce_bucket_size": 50000000,
            "overlap_comm": True, "contiguous_gradients": True, "cpu_offload": False}}, ()),
    "a pretraining with a predivide factor": ({
        "train_batch_size": 4096, "train_micro_batch_size_per_gpu": 4096, "steps_per_print": 100,
        "prescale_gradients": True, "gradient_predivide_factor": 8,
        "optimizer": {"type": "Adam", "params": {"lr": 6e-3, "betas": [0.9, 0.99],
                                                 "weight_decay": 0.01}},
        "fp16": {"enabled": True, "loss_scale": 0}},
        ("/prescale_gradients", "/gradient_predivide_factor")),
    "1-bit Adam": ({
        "train_batch_size": 16, "train_micro_batch_size_per_gpu": 16, "steps_per_print": 1,
        "optimizer": {"type": "OneBitAdam", "params": {
            "lr": 4e-4, "freeze_step": 23000, "cuda_aware": False, "weight_decay": 0.01,
            "bias_correction": False, "comm_backend_name": "nccl"}},
        "fp16": {"enabled": True}}, ("/optimizer/type", "/optimizer/params/bias_correction")),
    "1-bit Lamb": ({
        "train_batch_size": 64, "optimizer": {"type": "OneBitLamb", "params": {
            "lr": 11e-3, "max_coeff": 0.3, "min_coeff": 0.01, "freeze_step": 1000,
            "coeff_beta": 0.9, "factor_max": 4.0}}, "gradient_clipping": 1.0},
        ("/optimizer/type",)),
    "instruction tuning, stage 2": ({
        **_AUTO_BATCH, "gradient_accumulation_steps": AUTO, "gradient_clipping": AUTO,
        "zero_allow_untested_optimizer": True, "fp16": _AUTO_FP16, "bf16": {"enabled": AUTO},
        "zero_optimization": {"stage": 2, "allgather_partitions": True, "overlap_comm": False,
                              "allgather_bucket_size": 5e8, "reduce_scatter": True,
                              "reduce_bucket_size": 5e8, "contiguous_gradients": True,
                              "round_robin_gradients": True}}, ()),
    "instruction tuning, quantized stage 3": ({
        **_AUTO_BATCH, "bf16": {"enabled": True}, "zero_optimization": {
            **_STAGE_3, "zero_quantized_weights": True, "zero_quantized_gradients": True,
            "zero_hpz_partition_size": 8}},
        ("/zero_optimization/stage", "/zero_optimization/zero_quantized_weights",
         "/zero_optimization/zero_quantized_gradients")),
    "a pipeline of a large language model": ({
        "train_micro_batch_size_per_gpu": 4, "train_batch_size": 64, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1}, "bf16": {"enabled": True}, "steps_per_print": 2000,
        "data_types": {"grad_accum_dtype": "fp32"}, "wall_clock_breakdown": False,
        "activation_checkpointing": {"partition_activations": True}}, ()),
    "a pipeline in fp16": ({
        "train_micro_batch_size_per_gpu": 1, "train_batch_size": 8, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 0}, "zero_allow_untested_optimizer": True,
        "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2,
                 "min_loss_scale": 1, "initial_scale_power": 12}, "pipeline": {"stages": 2}}, ()),
    "chat tuning, with the old names": ({
        "train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 10,
        "zero_optimization": {
            "stage": 2, "offload_param": {"device": "none"}, "offload_optimizer":
            {"device": "none"}, "stage3_param_persistence_threshold": 1e4,
            "stage3_max_live_parameters": 3e7, "stage3_prefetch_bucket_size": 3e7,
            "memory_efficient_linear": False},
        "fp16": {"enabled": True, "loss_scale_window": 100}, "gradient_clipping": 1.0,
        "prescale_gradients": False, "wall_clock_breakdown": False, "hybrid_engine": {
            "enabled": False, "max_out_tokens": 512, "inference_tp_size": 1},
        "tensorboard": {"enabled": False, "output_path": "out", "job_name": "step1"}}, ()),
    "stage 2 with stage 3's names from before": ({
        "train_batch_size": 8, "bf16": {"enabled": True}, "zero_optimization": {
            "stage": 2, "max_live_parameters": 1e9, "max_reuse_distance": 1e9,
            "gather_16bit_weights_on_model_save": True, "prefetch_bucket_size": 5e7,
            "param_persistence_threshold": 1e5}}, ()),
    "fp16 weights saved by the older name": ({
        "train_batch_size": 8, "fp16": {"enabled": True}, "zero_optimization": {
            "stage": 1, "stage3_gather_fp16_weights_on_model_save": True,
            "cpu_offload": False}}, ()),
    "cpu_offload by its old name": ({
        "train_batch_size": 8, "fp16": {"enabled": True}, "optimizer":
        {"type": "Adam", "params": {"lr": 1e-5}}, "zero_optimization": {
            "stage": 2, "cpu_offload": True, "cpu_offload_use_pin_memory": True}}, ()),
    "state on disks": ({
        "train_batch_size": 8, "bf16": {"enabled": True}, "aio": {"block_size": 1048576},
        "zero_optimization": {"stage": 3, "offload_optimizer": {
            "device": "nvme", "nvme_path": "/local_nvme", "buffer_count": 4}}},
        ("/zero_optimization/offload_optimizer/device", "/zero_optimization/stage")),
    "reinforcement learning, reference model": ({
        "steps_per_print": 100, "zero_optimization": {
            "stage": 0, "stage3_param_persistence_threshold": AUTO, "offload_param":
            {"device": "none", "pin_memory": True}}, "bf16": {"enabled": True},
        "gradient_clipping": 1.0, "prescale_gradients": False, "wall_clock_breakdown": False,
        "train_micro_batch_size_per_gpu": 2, "train_batch_size": 16}, ()),
    "reinforcement learning, actor": ({
        "steps_per_print": 100, "zero_optimization": {
            "stage": 2, "reduce_bucket_size": AUTO, "offload_optimizer": {"device": "none"},
            "zero_hpz_partition_size": 1, "zero_quantized_weights": False,
            "zero_quantized_gradients": False, "sub_group_size": AUTO}, "bf16": {"enabled": True},
        "gradient_clipping": 1.0, "data_types": {"grad_accum_dtype": None},
        "train_micro_batch_size_per_gpu": 2, "train_batch_size": 16,
        "compile": {"deepcompile": False}}, ()),
    "notes and keys of other programs": ({
        "_comment": "tuned for eight devices", "//": "see the wiki", "comms_config": {"x": 1},
        "monitor_config": {"enabled": False}, "train_batch_size": 8, "zero_optimization": {
            "stage": 1}, "gradient_checkpointing": True, "my_project": {"run": 7},
        "log_level": "info"}, ()),
    "torch's own Adam": ({
        "train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {
            "torch_adam": True, "adam_w_mode": True, "lr": 3e-5, "betas": [0.9, 0.95],
            "fused": True, "foreach": False, "capturable": False}},
        "zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}, ()),
    "all monitors and profilers": ({
        "train_batch_size": 8, "wandb": {"enabled": False, "project": "p"}, "csv_monitor":
        {"enabled": False}, "comet": {"enabled": False}, "flops_profiler": {"enabled": False,
                                                                            "profile_step": 1},
        "comms_logger": {"enabled": False, "verbose": False}, "memory_breakdown": False,
        "dump_state": False, "autotuning": {"enabled": False},
        "checkpoint": {"tag_validation": "Warn", "use_node_local_storage": False},
        "data_efficiency": {"enabled": False}, "timers": {"throughput": {"enabled": False}},
        "dataloader_drop_last": True, "communication_data_type": "fp32",
        "seq_parallel_communication_data_type": "bf16"}, ()),
    "another optimizer": ({
        "train_batch_size": 8, "optimizer": {"type": "Muon", "params": {
            "lr": 1e-3, "momentum": 0.9, "ns_method": "gram"}}}, ("/optimizer/type",)),
    # DeepSpeed has dropped these sections and refuses them, too.
    "dropped sections": ({"train_batch_size": 8, "elasticity": {"enabled": False},
                          "progressive_layer_drop": {"enabled": False}}, ()),
    "apex": ({"train_batch_size": 8, "amp": {"enabled": True, "opt_level": "O1"},
              "zero_optimization": {"stage": 0}}, ("/amp",)),
    "FP8 of layers": ({
        "train_batch_size": 8, "bf16": {"enabled": True}, "fp8": {"enabled": True, "margin": 0},
        "zero_optimization": {"stage": 1}}, ("/fp8",)),
}

// A row per key. Nothing else in the library knows which keys exist, their types, bounds or
// defaults.
#include "src/config/keys.h"

namespace zerofp8 {
namespace {

using enum KeyType;
using enum KeyRole;

constexpr Limits any() { return {}; }
constexpr Limits one_of(std::string_view choices) { return {.choices = choices}; }
constexpr Limits at_least(double min) { return {.min = min}; }
constexpr Limits above(double min) { return {.min = min, .above_min = true}; }
constexpr Limits between(double min, double max) { return {.min = min, .max = max}; }
constexpr Limits from_up_to(double min, double max) {
  return {.min = min, .max = max, .below_max = true};
}
constexpr Limits or_auto(Limits limits) {
  limits.takes_auto = true;
  return limits;
}
constexpr Limits or_null(Limits limits) {
  limits.takes_null = true;
  return limits;
}
constexpr Key trainer(std::string_view path, std::string_view help) {
  return {path, kAny, "", or_null(or_auto({})), kTrainer, help};
}
constexpr Key no_effect(std::string_view path, std::string_view help) {
  return {path, kAny, "", or_null({}), kNoEffect, help};
}
constexpr Key refused(std::string_view path, std::string_view help) {
  return {path, kAny, "", {.takes_nothing = true}, kRefused, help};
}
// Refused with any value.
constexpr Key never(std::string_view path, std::string_view help) {
  return {path, kAny, "", {}, kRefused, help};
}
// A parameter of another optimizer.
constexpr Key foreign(std::string_view path, std::string_view help) { return refused(path, help); }

constexpr std::string_view kAccumulators = "fp32|bf16|fp16|fp8_e4m3|fp8_e5m2";
constexpr std::string_view kPlainTypes = "fp32|fp16|bf16";
constexpr double kMaxRanks = 1 << 30;
constexpr std::string_view kNoLossScale =
    "bf16 has the exponent range of fp32 and takes no loss scale: remove the key, or move it to "
    "/fp16 if the model is fp16";

constexpr Key kKeys[] = {
    {"/$schema", kString, "", any(), kTrainer, "Path or URL of the JSON Schema, for editors."},
    // Batch sizes: any two (or one) give the others; data ranks come from the launcher.
    {"/train_batch_size", kInteger, "", or_null(or_auto(at_least(1))), kOurs,
     "Samples per optimizer step over all data-parallel ranks."},
    {"/train_micro_batch_size_per_gpu", kInteger, "", or_null(or_auto(at_least(1))), kOurs,
     "Samples per micro-batch and rank."},
    {"/gradient_accumulation_steps", kInteger, "1", or_null(or_auto(between(1, 1e9))), kOurs,
     "Micro-batches per optimizer step (A)."},
    // Gradients.
    {"/gradient_accumulation_dtype", kDType, "by opt_level", one_of(kAccumulators), kOurs,
     "Format that micro-batch gradients are summed in; short form, or an object with the keys "
     "below."},
    {"/gradient_accumulation_dtype/dtype", kDType, "by opt_level", one_of(kAccumulators), kOurs,
     "The same in the long form."},
    {"/gradient_accumulation_dtype/sharded", kBool, "by stage", any(), kOurs,
     "Whether a rank keeps only its shard of the sum; default true at stage 2, false below."},
    {"/gradient_accumulation_dtype/error_feedback", kBool, "false", any(), kOurs,
     "Keep a second FP8 block with what rounding left over, within one step; FP8 only."},
    {"/gradient_accumulation_dtype/format", kChoice, "e4m3", one_of("e4m3|e5m2"), kOurs,
     "Which FP8 format; FP8 only."},
    {"/data_types/grad_accum_dtype", kDType, "", or_null(one_of(kPlainTypes)), kOurs,
     "DeepSpeed's spelling of gradient_accumulation_dtype."},
    {"/data_types/param_dtype", kDType, "", or_null(one_of(kPlainTypes)), kOurs,
     "The model's dtype; must agree with the bf16 and fp16 flags."},
    trainer("/data_types/buffer_dtype", "Dtype of the model's buffers."),
    trainer("/data_types/keep_in_fp32_modules", "Modules that the trainer leaves in FP32."),
    {"/communication_data_type", kDType, "by opt_level", or_null(one_of(kPlainTypes)), kOurs,
     "Format of gradients on the wire; for FP8 use /zerofp8/gradient_communication_dtype."},
    {"/gradient_clipping", kNumber, "0", or_auto(at_least(0)), kOurs,
     "Largest global gradient norm; 0 turns clipping off (the norm is still reported)."},
    {"/prescale_gradients", kBool, "false", one_of("false"), kOurs,
     "Gradients are divided once, after the FP32 sum: leave it out, the mean is the same."},
    {"/gradient_predivide_factor", kNumber, "1", between(1, 1), kOurs,
     "Gradients are divided once, after the FP32 sum: leave it out, the mean is the same."},
    {"/gradient_allreduce_op", kChoice, "mean", one_of("mean"), kOurs,
     "The step's gradient is the mean over ranks and micro-batches; for a sum multiply the loss."},
    // The model's dtype.
    {"/bf16/enabled", kBool, "false", or_auto({}), kOurs,
     "The model's weights are bf16; under Python the model's own dtype decides."},
    no_effect("/bf16/check_grad_overflow",
              "non-finite gradients are always looked for, and the step is skipped"),
    no_effect("/bf16/immediate_grad_update",
              "gradients are always added to the accumulator at once"),
    {"/bf16/bf16_master_weights_and_grads", kBool, "false", one_of("false"), kOurs,
     "Use /zerofp8/master_weights and gradient_accumulation_dtype instead."},
    {"/bf16/bf16_optimizer_states", kBool, "false", one_of("false"), kOurs,
     "Use /zerofp8/exp_avg_dtype and exp_avg_sq_dtype instead."},
    never("/bf16/loss_scale", kNoLossScale),
    never("/bf16/initial_scale_power", kNoLossScale),
    never("/bf16/loss_scale_window", kNoLossScale),
    never("/bf16/hysteresis", kNoLossScale),
    never("/bf16/consecutive_hysteresis", kNoLossScale),
    never("/bf16/min_loss_scale", kNoLossScale),
    {"/fp16/enabled", kBool, "false", or_auto({}), kOurs,
     "The model's weights are fp16, and the loss is scaled; under Python the model's own dtype "
     "decides."},
    {"/fp16/loss_scale", kNumber, "0", between(0, 0x1p126), kOurs,
     "Static loss scale; 0 = dynamic."},
    {"/fp16/initial_scale_power", kInteger, "16", between(0, 126), kOurs,
     "The dynamic loss scale starts at 2 to this power."},
    {"/fp16/loss_scale_window", kInteger, "1000", at_least(1), kOurs,
     "Clean steps after which the dynamic loss scale doubles."},
    {"/fp16/hysteresis", kInteger, "2", between(1, 1e9), kOurs,
     "Overflows that it takes before the dynamic loss scale is halved."},
    {"/fp16/consecutive_hysteresis", kBool, "false", any(), kOurs,
     "Whether a clean step gives the hysteresis back."},
    {"/fp16/min_loss_scale", kNumber, "1", above(0), kOurs,
     "Floor of the dynamic loss scale; the next overflow there stops the run."},
    trainer("/fp16/auto_cast", "Whether the trainer casts inputs to fp16."),
    {"/fp16/fp16_master_weights_and_grads", kBool, "false", one_of("false"), kOurs,
     "Use /zerofp8/master_weights and gradient_accumulation_dtype instead."},
    // ZeRO.
    {"/zero_optimization/stage", kInteger, "0", between(0, 3), kOurs,
     "ZeRO stage: 0 shards nothing, 1 the optimizer state, 2 gradients too (3: not yet)."},
    {"/zero_optimization/reduce_bucket_size", kInteger, "500000000", at_least(1), kOurs,
     "Elements of a bucket, the unit in which gradients are reduced."},
    {"/zero_optimization/allgather_bucket_size", kInteger, "500000000", at_least(1), kOurs,
     "Elements gathered in one call when updated weights are sent to all ranks."},
    {"/zero_optimization/overlap_comm", kBool, "false", or_null({}), kOurs,
     "Whether reductions may run while the backward pass goes on; results have the same bits."},
    {"/zero_optimization/zero_hpz_partition_size", kInteger, "1", between(0, kMaxRanks), kOurs,
     "DeepSpeed's spelling of /zerofp8/shard_group_size; 0 and 1 mean not set."},
    {"/zero_optimization/offload_optimizer", kObject, "", or_null({}), kOurs,
     "Where optimizer state is; null means with the model."},
    {"/zero_optimization/offload_optimizer/device", kChoice, "none", one_of("none|cpu"), kOurs,
     "\"cpu\": accumulators, masters and moments of a model on a CUDA device are in host memory "
     "and "
     "the CPU updates them (under Python); a model on the CPU has them there anyway."},
    no_effect("/zero_optimization/offload_optimizer/nvme_path", "state is never on disks"),
    no_effect("/zero_optimization/offload_optimizer/buffer_count",
              "buffers of gradients on their way are bounded by bytes"),
    no_effect("/zero_optimization/offload_optimizer/pin_memory",
              "host memory that copies go to and from is always page-locked"),
    no_effect("/zero_optimization/offload_optimizer/pipeline_read", "state is never on disks"),
    no_effect("/zero_optimization/offload_optimizer/pipeline_write", "state is never on disks"),
    no_effect("/zero_optimization/offload_optimizer/fast_init", "state is never on disks"),
    no_effect("/zero_optimization/offload_optimizer/ratio", "all state is offloaded, or none"),
    no_effect("/zero_optimization/offload_optimizer/super_offload",
              "state is offloaded in one way"),
    no_effect("/zero_optimization/offload_optimizer/cpuadam_cores_perc",
              "threads are those of OpenMP"),
    {"/zero_optimization/offload_param", kObject, "", or_null({}), kOurs,
     "Weights stay with the model, as below stage 3 in DeepSpeed."},
    no_effect("/zero_optimization/offload_param/device",
              "weights stay with the model, as below stage 3 in DeepSpeed"),
    no_effect("/zero_optimization/offload_param/nvme_path", "nothing is offloaded"),
    no_effect("/zero_optimization/offload_param/buffer_count", "nothing is offloaded"),
    no_effect("/zero_optimization/offload_param/buffer_size", "nothing is offloaded"),
    no_effect("/zero_optimization/offload_param/max_in_cpu", "nothing is offloaded"),
    no_effect("/zero_optimization/offload_param/pin_memory", "nothing is offloaded"),
    {"/zero_optimization/cpu_offload", kBool, "false", or_null({}), kOurs,
     "Obsolete spelling of offload_optimizer: {\"device\": \"cpu\"}."},
    no_effect("/zero_optimization/cpu_offload_param",
              "weights stay with the model, as below stage 3 in DeepSpeed"),
    no_effect("/zero_optimization/cpu_offload_params",
              "weights stay with the model, as below stage 3 in DeepSpeed"),
    no_effect("/zero_optimization/cpu_offload_use_pin_memory",
              "host memory that copies go to and from is always page-locked"),
    refused("/zero_optimization/zenflow", "ZenFlow updates a part of the weights later: remove it"),
    refused("/zero_optimization/zero_quantized_nontrainable_weights",
            "frozen weights stay as the model has them: remove it"),
    refused("/zero_optimization/zero_quantized_gradients",
            "use /zerofp8/gradient_communication_dtype: \"fp8\""),
    refused("/zero_optimization/zero_quantized_weights",
            "only the weight's own dtype is gathered: remove it"),
    no_effect("/zero_optimization/contiguous_gradients", "gradients always lie in flat buckets"),
    no_effect("/zero_optimization/reduce_scatter", "gradients are always reduce-scattered"),
    no_effect("/zero_optimization/use_multi_rank_bucket_allreduce", "there is one reduction"),
    no_effect("/zero_optimization/allgather_partitions", "weights are always all-gathered"),
    no_effect("/zero_optimization/round_robin_gradients", "every bucket is cut in equal shards"),
    no_effect("/zero_optimization/load_from_fp32_weights", "masters are saved bit for bit"),
    no_effect("/zero_optimization/elastic_checkpoint", "any number of ranks loads a checkpoint"),
    no_effect("/zero_optimization/ignore_unused_parameters",
              "unused parameters are always accepted"),
    no_effect("/zero_optimization/legacy_stage1", "there is one stage 1"),
    no_effect("/zero_optimization/compute_grad_norm", "the norm is always computed"),
    no_effect("/zero_optimization/parameter_alignment", "parameters are aligned to blocks"),
    no_effect("/zero_optimization/ignore_missing_optim_state",
              "a checkpoint without the optimizer's state is an error"),
    trainer("/zero_optimization/pipeline_loading_checkpoint", "Stage 3 only."),
    trainer("/zero_optimization/override_module_apply", "Stage 3 only."),
    trainer("/zero_optimization/leaf_module", "Stage 3 only."),
    trainer("/zero_optimization/save_muon_momentum_buffer_in_memory", "Muon at stage 3 only."),
    trainer("/zero_optimization/enable_sanity_checks", "Checks of the trainer."),
    trainer("/zero_optimization/sub_group_size", "Stage 3 only."),
    trainer("/zero_optimization/stage3_prefetch_bucket_size", "Stage 3 only."),
    trainer("/zero_optimization/stage3_param_persistence_threshold", "Stage 3 only."),
    trainer("/zero_optimization/stage3_model_persistence_threshold", "Stage 3 only."),
    trainer("/zero_optimization/stage3_max_live_parameters", "Stage 3 only."),
    trainer("/zero_optimization/stage3_max_reuse_distance", "Stage 3 only."),
    trainer("/zero_optimization/stage3_gather_16bit_weights_on_model_save", "Stage 3 only."),
    trainer("/zero_optimization/stage3_module_granularity_threshold", "Stage 3 only."),
    trainer("/zero_optimization/stage3_use_all_reduce_for_fetch_params", "Stage 3 only."),
    trainer("/zero_optimization/stage3_allgather_sequential", "Stage 3 only."),
    trainer("/zero_optimization/memory_efficient_linear", "Stage 3 only."),
    trainer("/zero_optimization/log_trace_cache_warnings", "Stage 3 only."),
    // Optimizer.
    {"/optimizer/type", kChoice, "AdamW", one_of("Adam|AdamW"), kOurs,
     "AdamW decays weights directly; Adam adds the decay to the gradient (L2) unless adam_w_mode "
     "says true. No other optimizer runs."},
    {"/optimizer/params/lr", kNumber, "0.001", or_auto(between(0, 1e38)), kOurs, "Learning rate."},
    {"/optimizer/params/betas", kNumberPair, "[0.9, 0.999]", or_auto(from_up_to(0, 1)), kOurs,
     "Decay rates of the two moments."},
    {"/optimizer/params/eps", kNumber, "1e-08", or_auto(between(1.2e-38, 1e38)), kOurs,
     "Added to the root of the second moment."},
    {"/optimizer/params/weight_decay", kNumber, "0", or_auto(between(0, 1e38)), kOurs,
     "Weight decay."},
    {"/optimizer/params/adam_w_mode", kBool, "by type", any(), kOurs,
     "true: decoupled decay (AdamW); false: L2 (Adam)."},
    {"/optimizer/params/torch_adam", kBool, "false", any(), kNoEffect,
     "the step is always zerofp8's own"},
    no_effect("/optimizer/params/fused", "the step is always zerofp8's own"),
    no_effect("/optimizer/params/foreach", "the step is always zerofp8's own"),
    no_effect("/optimizer/params/capturable",
              "whole steps in CUDA graphs: the argument of that name"),
    no_effect("/optimizer/params/set_grad_none", "gradients are taken as they are produced"),
    refused("/optimizer/params/differentiable", "a step has no gradient of its own: remove it"),
    refused("/optimizer/params/maximize",
            "pass an optimizer with maximize=True to initialize, or negate the loss"),
    {"/optimizer/params/bias_correction", kBool, "true", one_of("true"), kOurs,
     "Moments are always corrected for their start at zero: leave it out."},
    {"/optimizer/params/amsgrad", kBool, "false", one_of("false"), kOurs,
     "The running maximum of amsgrad is not kept."},
    {"/optimizer/params/fp32_optimizer_states", kBool, "true", one_of("true"), kOurs,
     "Use /zerofp8/exp_avg_dtype and exp_avg_sq_dtype instead."},
    refused("/optimizer/params/max_grad_norm", "use /gradient_clipping"),
    foreign("/optimizer/params/freeze_step", "of OneBitAdam and OneBitLamb: remove it"),
    foreign("/optimizer/params/var_freeze_step", "of ZeroOneAdam: remove it"),
    foreign("/optimizer/params/var_update_scaler", "of ZeroOneAdam: remove it"),
    foreign("/optimizer/params/local_step_scaler", "of ZeroOneAdam: remove it"),
    foreign("/optimizer/params/local_step_clipper", "of ZeroOneAdam: remove it"),
    foreign("/optimizer/params/cuda_aware", "of the 1-bit optimizers: remove it"),
    foreign("/optimizer/params/comm_backend_name", "of the 1-bit optimizers: remove it"),
    foreign("/optimizer/params/max_coeff", "of Lamb and OneBitLamb: remove it"),
    foreign("/optimizer/params/min_coeff", "of Lamb and OneBitLamb: remove it"),
    foreign("/optimizer/params/coeff_beta", "of OneBitLamb: remove it"),
    foreign("/optimizer/params/factor_max", "of OneBitLamb: remove it"),
    foreign("/optimizer/params/factor_min", "of OneBitLamb: remove it"),
    foreign("/optimizer/params/factor_threshold", "of OneBitLamb: remove it"),
    foreign("/optimizer/params/momentum", "of SGD, Muon and RMSprop: remove it"),
    foreign("/optimizer/params/nesterov", "of SGD: remove it"),
    foreign("/optimizer/params/dampening", "of SGD: remove it"),
    no_effect("/optimizer/legacy_fusion", "the step is always zerofp8's own"),
    trainer("/scheduler", "Learning-rate schedule."),
    // MS-AMP's section of DeepSpeed configs.
    {"/msamp/enabled", kBool, "false", any(), kOurs, "Whether /msamp/opt_level applies."},
    {"/msamp/opt_level", kChoice, "O1", one_of("O1|O2|O3"), kOurs,
     "MS-AMP's spelling of /zerofp8/opt_level."},
    {"/msamp/use_te", kBool, "false", one_of("false"), kOurs, "Layers are not replaced."},
    // zerofp8's own.
    {"/zerofp8/opt_level", kChoice, "O0", one_of("O0|O1|O2|O3"), kOurs,
     "Preset of all dtypes: O0 FP32 state, O1 FP8 gradients, O2 and O3 FP8 state too."},
    {"/zerofp8/gradient_communication_dtype", kDType, "by opt_level", one_of(kAccumulators), kOurs,
     "Format of gradients on the wire; \"fp8\" takes the accumulator's FP8 format, else E4M3."},
    {"/zerofp8/two_level_reduce_scatter", kObject, "", any(), kOurs,
     "Gradients are added up inside each node first, then across the nodes in "
     "gradient_communication_dtype; those of named reduce groups keep one level."},
    {"/zerofp8/two_level_reduce_scatter/ranks_per_node", kInteger, "1", between(1, kMaxRanks),
     kOurs,
     "Consecutive data ranks that share a node; divides the ranks of a shard group; 1 = one "
     "level."},
    {"/zerofp8/two_level_reduce_scatter/in_node_dtype", kDType, "fp32", one_of("fp32|bf16"), kOurs,
     "Format of gradients on the wire inside a node."},
    {"/zerofp8/weight_communication_dtype", kDType, "the weight's dtype", one_of(kAccumulators),
     kOurs, "Format of updated weights on the wire; only the weight's own dtype runs so far."},
    {"/zerofp8/exp_avg_dtype", kDType, "by opt_level", one_of("fp32|bf16|fp16|fp8_e4m3"), kOurs,
     "Format of Adam's first moment."},
    {"/zerofp8/exp_avg_sq_dtype", kDType, "by opt_level", one_of("fp32|bf16|fp16|fp8_ue4m4"), kOurs,
     "Format of Adam's second moment: FP32 keeps v, all others its root; \"fp8\" is UE4M4."},
    {"/zerofp8/master_weights", kChoice, "by opt_level", one_of("none|bits8|bits16|fp32"), kOurs,
     "What is kept beside a 16-bit weight: nothing (stochastic rounding), 8 or 16 more bits, or "
     "an FP32 copy."},
    {"/zerofp8/fp32_moments_below", kInteger, "4096", at_least(0), kOurs,
     "One-dimensional parameters and those with fewer elements keep FP32 moments; 0 = none do."},
    {"/zerofp8/block_size",
     kInteger,
     "128",
     {.choices = "32|64|128|256"},
     kOurs,
     "Elements that share one scale."},
    {"/zerofp8/seed", kInteger, "0", at_least(0), kOurs, "Seed of stochastic rounding."},
    {"/zerofp8/shard_group_size", kInteger, "all data ranks", between(1, kMaxRanks), kOurs,
     "Ranks that share one copy of the optimizer state (hybrid sharding); divides the data "
     "ranks."},
    {"/zerofp8/pipeline_parallel", kChoice, "auto", one_of("auto"), kOurs,
     "Which pipeline engine is in use; found from the launch."},
    {"/zerofp8/comm_backend", kChoice, "auto", one_of("auto|torch|mpi|nccl"), kOurs,
     "What carries the collectives under Python: \"torch\" its process groups, \"mpi\" Open MPI, "
     "under mpirun, \"nccl\" NCCL, where state is on CUDA devices; \"auto\" is \"nccl\" there if "
     "it "
     "was built in, else \"torch\". In C++ the program makes the communicator."},
    {"/zerofp8/overrides", kList, "[]", any(), kOurs,
     "Settings per parameter pattern; must be empty so far."},
    // Read by the trainer.
    trainer("/steps_per_print", "How often the trainer prints."),
    trainer("/wall_clock_breakdown", "Timers of the trainer."),
    trainer("/memory_breakdown", "Memory log of the trainer."),
    trainer("/dump_state", "State dump of the trainer."),
    trainer("/dataloader_drop_last", "Whether an incomplete last batch is dropped."),
    trainer("/zero_allow_untested_optimizer", "The trainer's own check of optimizers."),
    trainer("/zero_force_ds_cpu_optimizer", "The trainer's own check of optimizers."),
    trainer("/seq_parallel_communication_data_type", "Dtype of sequence-parallel collectives."),
    trainer("/sequence_parallel_size", "Ranks that share a sequence."),
    trainer("/tensor_parallel", "Tensor parallelism of the trainer."),
    trainer("/pipeline", "Pipeline partitioning."),
    trainer("/checkpoint", "The trainer's checkpoints."),
    trainer("/activation_checkpointing", "Recomputation of activations."),
    trainer("/torch_autocast", "Automatic mixed precision of the forward pass."),
    trainer("/managed_gradient_accumulation", "Who counts micro-batches in the trainer."),
    trainer("/disable_allgather", "Debug switch of the trainer."),
    trainer("/disable_python_gc", "Garbage collection of the trainer."),
    trainer("/use_data_before_expert_parallelism", "Order of the trainer's process groups."),
    trainer("/compile", "torch.compile."),
    trainer("/timers", "Timers of the trainer."),
    trainer("/tensorboard", "Monitoring."),
    trainer("/wandb", "Monitoring."),
    trainer("/csv_monitor", "Monitoring."),
    trainer("/comet", "Monitoring."),
    trainer("/flops_profiler", "Profiler of the trainer."),
    trainer("/comms_logger", "Log of the trainer's own collectives."),
    trainer("/aio", "Asynchronous file access of the trainer."),
    trainer("/autotuning", "Tuning of the trainer."),
    trainer("/elasticity", "Elastic training."),
    trainer("/data_efficiency", "Data sampling."),
    trainer("/curriculum_learning", "Data sampling."),
    trainer("/hybrid_engine", "Generation during training."),
    trainer("/log_level", "How much the trainer prints."),
    trainer("/vocabulary_size", "A check of the trainer."),
    trainer("/allgather_size", "Of the boolean form of /zero_optimization."),
    trainer("/comms_config", "Not read by DeepSpeed either: its key is /comms_logger."),
    trainer("/monitor_config", "Not read by DeepSpeed either: its keys are those of each monitor."),
    trainer("/expert_parallel", "Expert parallelism of the trainer."),
    trainer("/progressive_layer_drop", "Layers that the trainer leaves out."),
    trainer("/gradient_checkpointing", "Recomputation of activations."),
    trainer("/sparse_attention", "Attention of the model."),
    trainer("/compression_training", "Compression of the model, which the trainer starts."),
    trainer("/eigenvalue", "Analysis by the trainer."),
    trainer("/nebula", "The trainer's checkpoints."),
    trainer("/datastates_ckpt", "The trainer's checkpoints."),
    trainer("/checkpoint_writer", "The trainer's checkpoints."),
    trainer("/inference", "Generation by the trainer."),
    trainer("/weight_quantization", "Weights of inference."),
    refused("/quantize_training", "weights keep the model's dtype: remove it"),
    refused("/fp8",
            "FP8 of layers (Transformer Engine) is the model's; FP8 gradients and state are "
            "/zerofp8/opt_level: remove it"),
    refused("/amp", "use bf16 or fp16: torch's and apex's loss scaling would run twice"),
    refused("/sparse_gradients", "gradients are dense: remove it"),
    refused("/fp32_allreduce", "obsolete: use communication_data_type: \"fp32\""),
};

}  // namespace

std::span<const Key> keys() { return kKeys; }

}  // namespace zerofp8

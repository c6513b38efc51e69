// A small byte-level GPT: pre-norm blocks, learned positions, untied head. Weights may be kept in
// bf16 or fp16; they are widened to the compute dtype where they are used, so gradients arrive in
// the weights' dtype.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

namespace zerofp8::example {

struct GptOptions {
  std::int64_t layers = 2;
  std::int64_t width = 64;
  std::int64_t heads = 4;
  std::int64_t context = 64;
};

class Gpt {
 public:
  // Same initial weights for the same seed, whatever the dtype (rounded from FP32).
  Gpt(const GptOptions& options, std::uint64_t seed, torch::Dtype weights);

  // Mean cross-entropy, in nats per byte. tokens, targets: (batch, context), int64.
  torch::Tensor loss(const torch::Tensor& tokens, const torch::Tensor& targets) const;

  struct Named {
    std::string name;
    torch::Tensor tensor;
  };
  const std::vector<Named>& parameters() const { return parameters_; }
  std::int64_t parameter_count() const;

 private:
  struct Block {
    torch::Tensor norm1, bias1, norm2, bias2, qkv, qkv_bias, out, out_bias, up, up_bias, down,
        down_bias;
  };
  torch::Tensor add(const std::string& name, torch::Tensor value);
  torch::Tensor attention(const Block& block, const torch::Tensor& x) const;

  GptOptions options_;
  torch::Dtype weights_;
  std::vector<Named> parameters_;
  torch::Tensor embedding_, position_, final_norm_, final_bias_, head_, head_bias_;
  std::vector<Block> blocks_;
};

}  // namespace zerofp8::example

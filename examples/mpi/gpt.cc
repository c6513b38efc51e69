#include "gpt.h"

#include <cmath>

namespace zerofp8::example {
namespace {

namespace F = torch::nn::functional;
constexpr std::int64_t kBytes = 256;

torch::Tensor wide(const torch::Tensor& weight) { return weight.to(torch::kFloat); }

torch::Tensor linear(const torch::Tensor& x, const torch::Tensor& weight,
                     const torch::Tensor& bias) {
  return torch::linear(x, wide(weight), wide(bias));
}

torch::Tensor norm(const torch::Tensor& x, const torch::Tensor& weight, const torch::Tensor& bias) {
  return torch::layer_norm(x, {x.size(-1)}, wide(weight), wide(bias));
}

// torch.nn.Linear's initialisation: uniform within 1 / sqrt(inputs).
torch::Tensor uniform(torch::IntArrayRef shape, std::int64_t inputs,
                      const at::Generator& generator) {
  const double bound = 1.0 / std::sqrt(static_cast<double>(inputs));
  return torch::empty(shape).uniform_(-bound, bound, generator);
}

}  // namespace

Gpt::Gpt(const GptOptions& o, std::uint64_t seed, torch::Dtype weights)
    : options_(o), weights_(weights) {
  at::Generator g = at::detail::createCPUGenerator(seed);
  const std::int64_t c = o.width;
  embedding_ = add("embedding", torch::empty({kBytes, c}).normal_(0, 1, g));
  position_ = add("position", torch::empty({o.context, c}).normal_(0, 1, g));
  for (std::int64_t i = 0; i < o.layers; ++i) {
    const std::string p = "block" + std::to_string(i) + ".";
    Block b;
    b.norm1 = add(p + "norm1.weight", torch::ones({c}));
    b.bias1 = add(p + "norm1.bias", torch::zeros({c}));
    b.qkv = add(p + "qkv.weight", uniform({3 * c, c}, c, g));
    b.qkv_bias = add(p + "qkv.bias", uniform({3 * c}, c, g));
    b.out = add(p + "out.weight", uniform({c, c}, c, g));
    b.out_bias = add(p + "out.bias", uniform({c}, c, g));
    b.norm2 = add(p + "norm2.weight", torch::ones({c}));
    b.bias2 = add(p + "norm2.bias", torch::zeros({c}));
    b.up = add(p + "up.weight", uniform({4 * c, c}, c, g));
    b.up_bias = add(p + "up.bias", uniform({4 * c}, c, g));
    b.down = add(p + "down.weight", uniform({c, 4 * c}, 4 * c, g));
    b.down_bias = add(p + "down.bias", uniform({c}, 4 * c, g));
    blocks_.push_back(b);
  }
  final_norm_ = add("norm.weight", torch::ones({c}));
  final_bias_ = add("norm.bias", torch::zeros({c}));
  head_ = add("head.weight", uniform({kBytes, c}, c, g));
  head_bias_ = add("head.bias", uniform({kBytes}, c, g));
}

torch::Tensor Gpt::add(const std::string& name, torch::Tensor value) {
  torch::Tensor parameter = value.to(weights_).contiguous().set_requires_grad(true);
  parameters_.push_back({name, parameter});
  return parameter;
}

std::int64_t Gpt::parameter_count() const {
  std::int64_t count = 0;
  for (const Named& p : parameters_) count += p.tensor.numel();
  return count;
}

torch::Tensor Gpt::attention(const Block& b, const torch::Tensor& x) const {
  const std::int64_t batch = x.size(0), time = x.size(1), c = options_.width;
  const torch::Tensor qkv = linear(norm(x, b.norm1, b.bias1), b.qkv, b.qkv_bias)
                                .view({batch, time, 3, options_.heads, c / options_.heads})
                                .permute({2, 0, 3, 1, 4});
  const torch::Tensor mixed =
      at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], {}, 0.0, true);
  return linear(mixed.transpose(1, 2).reshape({batch, time, c}), b.out, b.out_bias);
}

torch::Tensor Gpt::loss(const torch::Tensor& tokens, const torch::Tensor& targets) const {
  torch::Tensor x =
      F::embedding(tokens, wide(embedding_)) + wide(position_).slice(0, 0, tokens.size(1));
  for (const Block& b : blocks_) {
    x = x + attention(b, x);
    const torch::Tensor hidden = torch::gelu(linear(norm(x, b.norm2, b.bias2), b.up, b.up_bias));
    x = x + linear(hidden, b.down, b.down_bias);
  }
  const torch::Tensor logits = linear(norm(x, final_norm_, final_bias_), head_, head_bias_);
  return F::cross_entropy(logits.flatten(0, 1), targets.flatten());
}

}  // namespace zerofp8::example

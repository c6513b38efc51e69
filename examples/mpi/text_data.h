// Real text as bytes: files named by the user, or the Python standard library's sources on this
// machine.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

namespace zerofp8::example {

struct Batch {
  torch::Tensor tokens, targets;  // (samples, context), int64
};

class TextData {
 public:
  // Empty `files`: the first 160 modules of the standard library of `python3`. The last 5 % are
  // held out. Throws std::runtime_error if a file cannot be read or there is too little text.
  explicit TextData(std::vector<std::string> files);

  // Sample positions depend on `key` only, so every rank and every run draws what it should.
  Batch train(std::uint64_t key, std::int64_t samples, std::int64_t context) const;
  Batch held_out(std::uint64_t key, std::int64_t samples, std::int64_t context) const;
  std::int64_t size() const { return bytes_.numel(); }
  const std::string& source() const { return source_; }

 private:
  Batch draw(std::uint64_t key, std::int64_t samples, std::int64_t context, std::int64_t begin,
             std::int64_t end) const;
  torch::Tensor bytes_;  // uint8
  std::int64_t train_end_ = 0;
  std::string source_;
};

}  // namespace zerofp8::example

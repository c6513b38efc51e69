// train_batch = micro_batch * A * data ranks: solved from what is written, as DeepSpeed does.
#include <fmt/format.h>

#include "src/config/reader.h"
#include "zerofp8/error.h"

namespace zerofp8 {
namespace {

constexpr std::string_view kTrain = "/train_batch_size";
constexpr std::string_view kMicro = "/train_micro_batch_size_per_gpu";
constexpr std::string_view kSteps = "/gradient_accumulation_steps";

// 0 = not written.
std::int64_t written(const Reader& read, std::string_view path,
                     const std::optional<BatchSizes>& supplied, std::int64_t BatchSizes::*field) {
  if (read.is_auto(path) && supplied) return (*supplied).*field;
  return read.find(path) ? read.integer<std::int64_t>(path).value : 0;
}

std::string change_text(const Launch& launch) {
  return fmt::format(
      "change it, the data ranks ({} from {}), or the other batch keys so that it "
      "divides",
      launch.data_ranks, launch.from);
}

// train / (a * b), or an error that explains the division.
std::int64_t divide(std::int64_t train, std::int64_t a, const std::string& a_name, std::int64_t b,
                    const std::string& b_name, const Launch& launch) {
  // a * b may not fit: what is above train cannot divide it.
  const bool fits = a <= train && b <= train / a;
  if (fits && train % (a * b) == 0) return train / (a * b);
  throw ConfigError(std::string(kTrain), fmt::to_string(train),
                    fmt::format("a multiple of {} ({}) x {} ({})", a_name, a, b_name, b),
                    change_text(launch));
}

std::int64_t product(std::int64_t micro, std::int64_t steps, std::int64_t ranks) {
  std::int64_t result = 0;
  if (__builtin_mul_overflow(micro, steps, &result) ||
      __builtin_mul_overflow(result, ranks, &result)) {
    throw ConfigError(std::string(kMicro), fmt::to_string(micro),
                      "a batch of fewer than 2^63 samples", "lower the batch sizes");
  }
  return result;
}

// 0 = not written as a number.
std::int64_t number_at(const Config::Impl& written, std::string_view path) {
  const Value* value = written.find(path);
  const auto* number = value == nullptr ? nullptr : std::get_if<std::int64_t>(&value->data);
  return number == nullptr ? 0 : *number;
}

}  // namespace

std::optional<int> implied_data_ranks(const Config& config) {
  const std::int64_t train = number_at(config.impl(), kTrain);
  const std::int64_t micro = number_at(config.impl(), kMicro);
  const std::int64_t steps = number_at(config.impl(), kSteps);
  if (train == 0 || micro == 0 || steps == 0) return std::nullopt;
  const std::int64_t ranks = micro > train ? 0 : train / micro / steps;
  if (ranks < 1 || ranks > (1 << 24) || ranks * micro * steps != train) return std::nullopt;
  return static_cast<int>(ranks);
}

BatchSizes resolve_batch(const Reader& read, const Launch& launch, const Arguments& arguments) {
  const std::int64_t ranks = launch.data_ranks;
  const std::string ranks_name = "data ranks";
  BatchSizes batch{
      .train_batch = written(read, kTrain, arguments.auto_batch, &BatchSizes::train_batch),
      .micro_batch = written(read, kMicro, arguments.auto_batch, &BatchSizes::micro_batch),
      .accumulation_steps =
          written(read, kSteps, arguments.auto_batch, &BatchSizes::accumulation_steps)};
  const bool default_steps = batch.accumulation_steps == 0;
  const std::string micro_name(kMicro);
  const std::string steps_name = std::string(kSteps) + (default_steps ? ", its default" : "");
  if (batch.train_batch > 0 && batch.micro_batch > 0) {
    const std::int64_t steps =
        divide(batch.train_batch, batch.micro_batch, micro_name, ranks, ranks_name, launch);
    if (batch.accumulation_steps > 0 && batch.accumulation_steps != steps) {
      throw ConfigError(
          std::string(kTrain), fmt::to_string(batch.train_batch),
          fmt::format("{} ({}) x {} ({}) x {} ({}) = {}", kMicro, batch.micro_batch, kSteps,
                      batch.accumulation_steps, ranks_name, ranks,
                      product(batch.micro_batch, batch.accumulation_steps, ranks)),
          fmt::format("change one of the three keys or the data ranks, from {}, or leave "
                      "one out and it is computed",
                      launch.from));
    }
    batch.accumulation_steps = steps;
    return batch;
  }
  if (batch.accumulation_steps == 0) batch.accumulation_steps = 1;
  if (batch.train_batch > 0) {
    batch.micro_batch =
        divide(batch.train_batch, batch.accumulation_steps, steps_name, ranks, ranks_name, launch);
  } else if (batch.micro_batch > 0) {
    batch.train_batch = product(batch.micro_batch, batch.accumulation_steps, ranks);
  }
  return batch;  // both 0: the trainer knows its batch, only A matters here
}

}  // namespace zerofp8

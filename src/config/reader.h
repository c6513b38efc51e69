// Typed access to written values, with the key table's default where a key is absent.
//
//   Reader read(config.impl());
//   Setting<int> stage = read.integer<int>("/zero_optimization/stage");
#pragma once

#include <charconv>
#include <string>
#include <string_view>

#include "src/config/config_impl.h"
#include "src/config/keys.h"

namespace zerofp8 {

class Reader {
 public:
  // `assumed`: where what is taken for an "auto" is noted.
  Reader(const Config::Impl& written, const Arguments& arguments, std::vector<std::string>& assumed)
      : written_(written), arguments_(arguments), assumed_(assumed) {}
  const Config::Impl& written() const { return written_; }
  const Arguments& arguments() const { return arguments_; }

  // nullptr if absent, or "auto" where the default may be assumed: else that is an error.
  const Value* find(std::string_view path) const;
  bool is_auto(std::string_view path) const;
  // Notes the value of an "auto" that no argument supplies, or throws the error for it.
  void assume(std::string_view path, std::string_view value) const;

  Setting<bool> boolean(std::string_view path) const;
  Setting<std::string> text(std::string_view path) const;
  Setting<double> number(std::string_view path) const;
  template <class T>
  Setting<T> integer(std::string_view path) const {
    if (const Value* value = find(path)) {
      return {static_cast<T>(std::get<std::int64_t>(value->data)), Origin::kKey, value->pointer};
    }
    T standard{};
    const std::string_view digits = find_key(path)->standard;
    std::from_chars(digits.data(), digits.data() + digits.size(), standard);
    return {standard, Origin::kDefault, default_where(path)};
  }

 private:
  std::string default_where(std::string_view path) const { return is_auto(path) ? "\"auto\"" : ""; }

  const Config::Impl& written_;
  const Arguments& arguments_;
  std::vector<std::string>& assumed_;
};

// Two keys for one setting: throws an error that names both if both are written and differ.
// `same` compares the meaning, so that "half" agrees with "fp16".
void require_agreement(const Value& a, const Value& b, bool same);

// The parts of resolve().
BatchSizes resolve_batch(const Reader& read, const Launch& launch, const Arguments& arguments);
Setting<AdamOptions> resolve_adam(const Reader& read, const Arguments& arguments,
                                  std::vector<std::string>& warnings);
Setting<LossScaleOptions> resolve_loss_scale(const Reader& read, bool enabled);
// What /bf16/enabled and /fp16/enabled say; "auto" is filled from the model, or assumed.
struct DTypeFlags {
  Setting<bool> bf16, fp16;
};
DTypeFlags read_flags(const Reader& read);
// weight, stage, accumulation*, error_feedback, gradient_wire, ranks_per_node, in_node_wire,
// weight_wire, master and moments.
void resolve_dtypes(const Reader& read, const DTypeFlags& flags, Settings& settings);
// The point of the support table that the settings are.
void check_cell(const Reader& read, const DTypeFlags& flags, const Settings& settings);

}  // namespace zerofp8

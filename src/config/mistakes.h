// All mistakes of one file, so that it takes one run to see them.
//
//   Mistakes mistakes;
//   mistakes.of([&] { s.batch = resolve_batch(...); });   // whether it throws or not
//   mistakes.raise();
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "zerofp8/config.h"
#include "zerofp8/error.h"

namespace zerofp8 {

class Mistakes {
 public:
  template <class Attempt>
  void of(const Attempt& attempt) {
    try {
      attempt();
    } catch (const UnsupportedError& error) {
      add(error, /*unsupported=*/true);
    } catch (const ConfigError& error) {
      add(error, /*unsupported=*/false);
    }
  }
  void add(const ConfigError& error, bool unsupported = false) {
    all_unsupported_ = all_unsupported_ && unsupported;
    if (!first_) first_ = error;
    const std::string what = error.what();
    add_text(what.substr(0, what.find('\n')));
    for (const std::string& text : error.others()) add_text(text);
  }
  // A further one, beside those that were added.
  void add_text(const std::string& text) {
    if (std::find(texts_.begin(), texts_.end(), text) == texts_.end()) texts_.push_back(text);
  }
  bool any() const { return first_.has_value(); }
  // Nothing without mistakes; UnsupportedError if the file is sound otherwise.
  void raise() const {
    if (!first_) return;
    const ConfigError first(first_->pointer(), first_->given(), first_->allowed(), first_->fix());
    const std::vector<std::string> others(texts_.begin() + 1, texts_.end());
    if (all_unsupported_) throw UnsupportedError(first, others);
    throw ConfigError(first, others);
  }

 private:
  std::optional<ConfigError> first_;
  std::vector<std::string> texts_;
  bool all_unsupported_ = true;
};

}  // namespace zerofp8

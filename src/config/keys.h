// The one table of config keys. Parser, error texts, JSON Schema and the reference are made from
// it.
//
//   const Key* key = find_key("/zero_optimization/stage");   // type, default, bounds, help
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zerofp8 {

enum class KeyType : std::uint8_t {
  kBool,
  kInteger,
  kNumber,
  kString,
  kChoice,      // one of the texts in `choices`
  kDType,       // as kChoice, but other spellings of the same format ("half") are accepted too
  kNumberPair,  // [a, b]
  kList,
  kObject,  // only its children have values
  kAny,
};

enum class KeyRole : std::uint8_t {
  kOurs,
  kTrainer,   // read by the trainer, not looked at here
  kNoEffect,  // tunes a part of the trainer that zerofp8 replaces: accepted, and a warning says so
  kRefused,   // known, but asks for something that does not happen; `help` says what to do.
};

// What a value may be. `choices` are separated by '|'.
struct Limits {
  std::string_view choices = {};
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  bool above_min = false;  // min itself is not allowed
  bool below_max = false;
  bool takes_auto = false;     // "auto": the caller supplies the value (Arguments)
  bool takes_null = false;     // null means absent, as in DeepSpeed
  bool takes_nothing = false;  // of kRefused: a value that asks for nothing is accepted
};

struct Key {
  std::string_view path;  // JSON pointer
  KeyType type;
  std::string_view standard;  // default as printed; "" = none
  Limits limits;
  KeyRole role;
  std::string_view help;  // one sentence
};

std::span<const Key> keys();
const Key* find_key(std::string_view path);
// True if keys exist below `path` ("/zero_optimization").
bool is_container(std::string_view path);
// Second names of blocks and keys: "/bfloat16" is "/bf16".
struct Alias {
  std::string_view alias, name;
};
std::span<const Alias> aliases();
// "/bfloat16/enabled" -> "/bf16/enabled"; other paths as they are.
std::string canonical_path(std::string_view path);
// Whether "auto" is the default, as in the blocks that DeepSpeed reads with its config models.
bool auto_is_default(const Key& key);

std::vector<std::string_view> split(std::string_view text, char separator);
// "one of \"fp32\", \"bf16\"", "a whole number >= 1", ...
std::string allowed_text(const Key& key);
// Spellings beside a format's own name that kDType keys take.
std::span<const std::string_view> dtype_spellings();

}  // namespace zerofp8

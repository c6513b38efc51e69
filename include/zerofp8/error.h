// Errors of zerofp8. Every message says what was given, what is allowed and what to change.
//
//   throw ConfigError("/zero_optimization/stage", "7", "0, 1, 2 or 3", "set the stage to one of
//   these");
//
// Errors that concern all ranks carry the same text on every rank, so that launchers show one
// story.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

namespace zerofp8 {

// Base of all exceptions thrown by this library.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A config file or an argument cannot be used. `pointer` is the JSON pointer (RFC 6901) of the key,
// or the name of the argument.
class ConfigError : public Error {
 public:
  ConfigError(std::string pointer, std::string given, std::string allowed, std::string fix)
      : Error(compose(pointer, given, allowed, fix)),
        pointer_(std::move(pointer)),
        given_(std::move(given)),
        allowed_(std::move(allowed)),
        fix_(std::move(fix)) {}
  // All mistakes of a file: its parts are those of the first, its text has a line for each.
  ConfigError(const ConfigError& first, std::vector<std::string> others)
      : Error(with_lines(first.what(), others)),
        pointer_(first.pointer_),
        given_(first.given_),
        allowed_(first.allowed_),
        fix_(first.fix_),
        others_(std::move(others)) {}

  const std::string& pointer() const { return pointer_; }
  const std::string& given() const { return given_; }
  const std::string& allowed() const { return allowed_; }
  const std::string& fix() const { return fix_; }
  const std::vector<std::string>& others() const { return others_; }  // texts of further mistakes

 private:
  static std::string with_lines(std::string text, const std::vector<std::string>& lines) {
    for (const std::string& line : lines) text += "\n" + line;
    return text;
  }
  static std::string compose(const std::string& pointer, const std::string& given,
                             const std::string& allowed, const std::string& fix) {
    std::string text = pointer.empty() ? std::string("config") : pointer;
    if (!given.empty()) text += ": given " + given;
    if (!allowed.empty()) text += "; allowed: " + allowed;
    if (!fix.empty()) text += "; " + fix;
    return text;
  }
  std::string pointer_, given_, allowed_, fix_;
  std::vector<std::string> others_;
};

// A call broke the contract of a function: wrong shape, unknown name, wrong order of calls.
class ArgumentError : public Error {
 public:
  using Error::Error;
};

// A collective failed or timed out. `absent_ranks` are those that did not take part.
class CommError : public Error {
 public:
  explicit CommError(const std::string& what, std::vector<int> absent_ranks = {})
      : Error(what), absent_ranks_(std::move(absent_ranks)) {}
  const std::vector<int>& absent_ranks() const { return absent_ranks_; }

 private:
  std::vector<int> absent_ranks_;
};

// A device cannot be used, or something that it was to do has failed.
class DeviceError : public Error {
 public:
  using Error::Error;
};

// A checkpoint is incomplete, damaged or belongs to another run. Nothing was overwritten.
class CheckpointError : public Error {
 public:
  CheckpointError(std::string file, const std::string& why)
      : Error(file + ": " + why), file_(std::move(file)) {}
  const std::string& file() const { return file_; }

 private:
  std::string file_;
};

// Training cannot go on: the loss scale is at its floor and gradients are still not finite.
class NumericError : public Error {
 public:
  using Error::Error;
};

}  // namespace zerofp8

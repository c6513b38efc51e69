#include "src/config/non_finite.h"

#include <cctype>
#include <limits>
#include <string_view>

namespace zerofp8 {
namespace {

struct Token {
  std::string_view name;
  double value;
};

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr Token kTokens[] = {{"NaN", std::numeric_limits<double>::quiet_NaN()},
                             {"Infinity", kInfinity},
                             {"-Infinity", -kInfinity}};

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

// The end of the string that begins at `begin`; its quotes are inside.
std::size_t string_end(std::string_view text, std::size_t begin) {
  for (std::size_t i = begin + 1; i < text.size(); ++i) {
    if (text[i] == '\\') {
      ++i;
    } else if (text[i] == '"') {
      return i + 1;
    }
  }
  return text.size();
}

// The end of a comment at `begin`, or `begin`.
std::size_t comment_end(std::string_view text, std::size_t begin) {
  const auto after = [&](std::string_view mark) {
    const std::size_t found = text.find(mark, begin + 2);
    return found == std::string_view::npos ? text.size() : found + mark.size();
  };
  if (text.substr(begin).starts_with("//")) return after("\n");
  if (text.substr(begin).starts_with("/*")) return after("*/");
  return begin;
}

const Token* token_at(std::string_view text, std::size_t begin) {
  if (begin > 0 && (is_word(text[begin - 1]) || text[begin - 1] == '-')) return nullptr;
  for (const Token& token : kTokens) {
    const std::size_t end = begin + token.name.size();
    if (!text.substr(begin).starts_with(token.name)) continue;
    if (end == text.size() || !is_word(text[end])) return &token;
  }
  return nullptr;
}

}  // namespace

FiniteText without_non_finite(const std::string& text) {
  FiniteText finite{text, {}};
  std::size_t strings = 0;
  for (std::size_t i = 0; i < text.size();) {
    if (text[i] == '"') {
      i = string_end(text, i);
      ++strings;
    } else if (const std::size_t end = comment_end(text, i); end > i) {
      i = end;
    } else if (const Token* token = token_at(text, i)) {
      finite.text[i] = finite.text[i + token->name.size() - 1] = '"';
      finite.numbers.emplace(strings++, token->value);
      i += token->name.size();
    } else {
      ++i;
    }
  }
  return finite;
}

}  // namespace zerofp8

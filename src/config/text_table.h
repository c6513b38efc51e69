// Tables for people: aligned columns on a terminal, or Markdown.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace zerofp8 {

enum class TableStyle : std::uint8_t { kPlain, kColor, kMarkdown };

struct Column {
  std::string title;
  bool right = false;  // numbers
};

struct TextTable {
  std::vector<Column> columns;
  std::vector<std::vector<std::string>> rows;
  std::string text(TableStyle style) const;
};

std::string bold(std::string_view text, TableStyle style);
// "14.00 GB" (powers of 1000), "512 B".
std::string bytes_text(std::int64_t bytes);
// "7,000,000,000"
std::string count_text(std::int64_t count);

}  // namespace zerofp8

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
  // Cells of left-aligned columns are broken into lines so that the table has `width` columns.
  std::string text(TableStyle style, int width = 0) const;  // 0: as wide as it is
};

// `text` in lines of at most `width` columns, broken at spaces, else after a '/' or anywhere.
std::vector<std::string> wrapped(std::string_view text, std::size_t width);
// The same with a line break after each; the second and further ones are indented.
std::string paragraph(std::string_view text, int width);

std::string bold(std::string_view text, TableStyle style);
// "14.00 GB" (powers of 1000), "512 B".
std::string bytes_text(std::int64_t bytes);
// The unit in which the largest of some sizes has one to three digits before the point.
struct ByteUnit {
  std::string_view name;
  double bytes = 1;
  explicit ByteUnit(std::int64_t largest);
  std::string text(std::int64_t size) const;  // without the name
};
// "7,000,000,000"
std::string count_text(std::int64_t count);

}  // namespace zerofp8

#include "src/config/text_table.h"

#include <fmt/format.h>

#include <algorithm>

namespace zerofp8 {
namespace {

std::string markdown_cell(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '|') out += '\\';
    out += c;
  }
  return out;
}

std::string markdown(const TextTable& table) {
  std::string text = "|";
  for (const Column& column : table.columns) text += fmt::format(" {} |", column.title);
  text += "\n|";
  for (const Column& column : table.columns) text += column.right ? "---:|" : "---|";
  for (const auto& row : table.rows) {
    text += "\n|";
    for (const std::string& cell : row) text += fmt::format(" {} |", markdown_cell(cell));
  }
  return text + "\n";
}

std::string aligned(const std::vector<std::string>& cells, const std::vector<Column>& columns,
                    const std::vector<std::size_t>& widths) {
  std::string line;
  for (std::size_t i = 0; i < cells.size(); ++i) {
    if (i > 0) line += "  ";
    line += columns[i].right ? fmt::format("{:>{}}", cells[i], widths[i])
                             : fmt::format("{:<{}}", cells[i], widths[i]);
  }
  line.erase(line.find_last_not_of(' ') + 1);
  return line;
}

}  // namespace

std::string bold(std::string_view text, TableStyle style) {
  if (style != TableStyle::kColor) return std::string(text);
  return fmt::format("\x1b[1m{}\x1b[0m", text);
}

std::string TextTable::text(TableStyle style) const {
  if (style == TableStyle::kMarkdown) return markdown(*this);
  std::vector<std::string> titles;
  std::vector<std::size_t> widths;
  for (std::size_t i = 0; i < columns.size(); ++i) {
    titles.push_back(columns[i].title);
    widths.push_back(columns[i].title.size());
    for (const auto& row : rows) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string out = bold(aligned(titles, columns, widths), style) + "\n";
  for (const auto& row : rows) out += aligned(row, columns, widths) + "\n";
  return out;
}

std::string bytes_text(std::int64_t bytes) {
  constexpr std::string_view kUnits[] = {"B", "kB", "MB", "GB", "TB", "PB"};
  if (bytes < 1000) return fmt::format("{} B", bytes);
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 999.995 && unit + 1 < std::size(kUnits)) {
    value /= 1000;
    ++unit;
  }
  return fmt::format("{:.2f} {}", value, kUnits[unit]);
}

std::string count_text(std::int64_t count) {
  const std::string digits = fmt::to_string(count);
  std::string text;
  for (std::size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return text;
}

}  // namespace zerofp8

#include "src/config/text_table.h"

#include <fmt/format.h>

#include <algorithm>

#include "src/config/keys.h"

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

// A row as lines: each of its cells in as many as its column is too narrow for.
std::string lines_of(const std::vector<std::string>& cells, const std::vector<Column>& columns,
                     const std::vector<std::size_t>& widths, TableStyle style) {
  std::vector<std::vector<std::string>> parts;
  std::size_t count = 1;
  for (std::size_t i = 0; i < cells.size(); ++i) {
    parts.push_back(wrapped(cells[i], widths[i]));
    count = std::max(count, parts.back().size());
  }
  std::string text;
  for (std::size_t n = 0; n < count; ++n) {
    std::vector<std::string> line;
    for (const auto& part : parts) line.push_back(n < part.size() ? part[n] : "");
    text += bold(aligned(line, columns, widths), style) + "\n";
  }
  return text;
}

// The longest part of a cell that is not broken where there is room.
std::size_t longest_word(std::string_view text) {
  std::size_t longest = 0;
  for (const std::string_view word : split(text, ' ')) longest = std::max(longest, word.size());
  return longest;
}

// Takes columns from the widest text until the table fits: words are broken last.
void fit(const TextTable& table, std::vector<std::size_t>& widths, int width) {
  std::vector<std::size_t> words;
  std::size_t total = 2 * (widths.size() - 1);
  for (std::size_t i = 0; i < widths.size(); ++i) {
    total += widths[i];
    words.push_back(longest_word(table.columns[i].title));
    for (const auto& row : table.rows) words[i] = std::max(words[i], longest_word(row[i]));
  }
  const auto widest = [&](const std::vector<std::size_t>& least) {
    std::size_t* found = nullptr;
    for (std::size_t i = 0; i < widths.size(); ++i) {
      const bool narrower = found != nullptr && widths[i] <= *found;
      if (!table.columns[i].right && !narrower && widths[i] > least[i]) found = &widths[i];
    }
    return found;
  };
  constexpr std::size_t kNarrowest = 8;
  const std::vector<std::size_t> least(widths.size(), kNarrowest);
  while (width > 0 && total > static_cast<std::size_t>(width)) {
    std::size_t* column = widest(words);
    if (column == nullptr) column = widest(least);
    if (column == nullptr) return;
    --*column;
    --total;
  }
}

// Where a line of at most `width` columns of `text` ends.
std::size_t line_end(std::string_view text, std::size_t width) {
  if (text.size() <= width) return text.size();
  const std::size_t space = text.rfind(' ', width);
  if (space != std::string_view::npos && space > 0) return space;
  const std::size_t slash = text.rfind('/', width - 1);
  if (slash != std::string_view::npos && slash > 0) return slash;
  return width;
}

}  // namespace

std::string bold(std::string_view text, TableStyle style) {
  if (style != TableStyle::kColor) return std::string(text);
  return fmt::format("\x1b[1m{}\x1b[0m", text);
}

std::vector<std::string> wrapped(std::string_view text, std::size_t width) {
  std::vector<std::string> lines;
  do {
    const std::size_t end = line_end(text, std::max<std::size_t>(width, 1));
    lines.emplace_back(text.substr(0, end));
    text.remove_prefix(end);
    while (text.starts_with(' ')) text.remove_prefix(1);
  } while (!text.empty());
  return lines;
}

std::string paragraph(std::string_view text, int width) {
  if (width <= 0) return std::string(text) + "\n";
  std::string out;
  constexpr std::size_t kIndent = 2;
  for (const std::string& line : wrapped(text, static_cast<std::size_t>(width) - kIndent)) {
    out += (out.empty() ? "" : "  ") + line + "\n";
  }
  return out;
}

ByteUnit::ByteUnit(std::int64_t largest) {
  constexpr std::string_view kUnits[] = {"B", "kB", "MB", "GB", "TB", "PB"};
  std::size_t unit = 0;
  while (static_cast<double>(largest) >= 999.995 * bytes && unit + 1 < std::size(kUnits)) {
    bytes *= 1000;
    ++unit;
  }
  name = kUnits[unit];
}

std::string ByteUnit::text(std::int64_t size) const {
  if (bytes == 1) return fmt::to_string(size);
  const double value = static_cast<double>(size) / bytes;
  return size > 0 && value < 0.001 ? "<0.001" : fmt::format("{:.3f}", value);
}

std::string TextTable::text(TableStyle style, int width) const {
  if (style == TableStyle::kMarkdown) return markdown(*this);
  std::vector<std::string> titles;
  std::vector<std::size_t> widths;
  for (std::size_t i = 0; i < columns.size(); ++i) {
    titles.push_back(columns[i].title);
    widths.push_back(columns[i].title.size());
    for (const auto& row : rows) widths[i] = std::max(widths[i], row[i].size());
  }
  fit(*this, widths, width);
  std::string out = lines_of(titles, columns, widths, style);
  for (const auto& row : rows) out += lines_of(row, columns, widths, TableStyle::kPlain);
  return out;
}

std::string bytes_text(std::int64_t bytes) {
  if (bytes < 1000) return fmt::format("{} B", bytes);
  const ByteUnit unit(bytes);
  return fmt::format("{:.2f} {}", static_cast<double>(bytes) / unit.bytes, unit.name);
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

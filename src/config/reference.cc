// The Markdown reference of all keys, made from the key table.
#include <fmt/format.h>

#include "src/config/keys.h"
#include "src/config/text_table.h"
#include "zerofp8/config.h"
#include "zerofp8/plan.h"

namespace zerofp8 {
namespace {

constexpr std::string_view kIntroduction = R"(# Config reference

<!-- Made by `zerofp8 schema --reference`; edit src/config/key_table.cc instead. -->

A config is a DeepSpeed JSON file with a few more keys. Keys are given as JSON pointers:
`/bf16/enabled` is `{"bf16": {"enabled": ...}}`. Comments (`//` and `/* */`) are accepted. A
mistyped key, a key written twice, a quoted number or boolean and two keys that contradict each
other are errors, found before anything is allocated or sent. `docs/config.schema.json` is the
same table for editors. `Infinity`, `-Infinity` and `NaN`, as Python's json writes them, are taken
in keys that only the trainer reads.

An explicit key wins over the opt level, the level over the default. With no level and no key, O0
applies. `"auto"` is accepted where a caller can supply the value, or where DeepSpeed takes it for
the default. `zerofp8 plan` and `check` take it for the default, print that, and change values with
`--set /path=value`; `zerofp8.initialize` fills it from the model and the template. In C++ it is an
error where `Arguments` has no value and does not assume.

Keys at the top that begin with `_` or `//` are comments. Others that are unknown are passed over
with a warning, as DeepSpeed does, unless they look like a mistyped or misplaced one.

)";

std::string code(std::string_view text) { return fmt::format("`{}`", text); }

TextTable own_keys() {
  TextTable table{{{"key"}, {"allowed"}, {"default"}, {"what it sets"}}, {}};
  for (const Key& key : keys()) {
    if (key.role != KeyRole::kOurs) continue;
    table.rows.push_back(
        {code(key.path), allowed_text(key), std::string(key.standard), std::string(key.help)});
  }
  return table;
}

TextTable other_keys(KeyRole role, const std::string& title) {
  TextTable table{{{"key"}, {title}}, {}};
  for (const Key& key : keys()) {
    if (key.role == role) table.rows.push_back({code(key.path), std::string(key.help)});
  }
  return table;
}

}  // namespace

std::string config_reference() {
  std::string text(kIntroduction);
  text += "## Keys that zerofp8 reads\n\n" + own_keys().text(TableStyle::kMarkdown);
  text += "\nOther names, as DeepSpeed has them:\n\n";
  for (const Alias& alias : aliases()) {
    text += fmt::format("- `{}` is `{}`.\n", alias.alias, alias.name);
  }
  text += "\n## Levels and supported combinations\n\n" + support_matrix(/*markdown=*/true);
  text += "\n## Keys that the trainer reads\n\nAccepted and passed over.\n\n" +
          other_keys(KeyRole::kTrainer, "what it sets").text(TableStyle::kMarkdown);
  text +=
      "\n## Keys without effect\n\nThey tune a part of the trainer that zerofp8 replaces: "
      "accepted with a warning.\n\n" +
      other_keys(KeyRole::kNoEffect, "why").text(TableStyle::kMarkdown);
  text +=
      "\n## Keys that are refused\n\nThey ask for something that does not happen; `false`, `null`, "
      "0, \"\", `{}`, `[]` and "
      "`{\"enabled\": false}` ask for nothing and are accepted.\n\n" +
      other_keys(KeyRole::kRefused, "what to do").text(TableStyle::kMarkdown);
  return text;
}

}  // namespace zerofp8

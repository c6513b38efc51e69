// All settings as name, value and origin: one list for tables and JSON.
#pragma once

#include <string>
#include <variant>
#include <vector>

#include "zerofp8/config.h"

namespace zerofp8 {

struct SettingLine {
  std::string name;
  std::variant<std::string, std::int64_t, double, bool> value;
  Origin origin;
  std::string where;
};

std::vector<SettingLine> setting_lines(const Settings& settings);
// "key /bf16/enabled", "level O2", "default (follows the stage)", ...
std::string origin_text(Origin origin, const std::string& where);

}  // namespace zerofp8

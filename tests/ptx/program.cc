#include "tests/ptx/program.h"

#include <fmt/format.h>

#include <algorithm>
#include <sstream>

namespace zerofp8::test::ptx {
namespace {

std::string trimmed(const std::string& s) {
  const auto begin = s.find_first_not_of(" \t");
  if (begin == std::string::npos) return "";
  return s.substr(begin, s.find_last_not_of(" \t") - begin + 1);
}

// At commas, but not within braces.
std::vector<std::string> operands_of(const std::string& text) {
  std::vector<std::string> list;
  std::string operand;
  int depth = 0;
  for (const char c : text) {
    depth += (c == '{') - (c == '}');
    if (c == ',' && depth == 0) {
      list.push_back(trimmed(operand));
      operand.clear();
    } else {
      operand += c;
    }
  }
  if (!trimmed(operand).empty()) list.push_back(trimmed(operand));
  return list;
}

std::size_t aligned(std::size_t at, std::size_t to) { return (at + to - 1) / to * to; }

class Parser {
 public:
  explicit Parser(const std::string& text) : in_(text) {}

  std::map<std::string, Kernel> run() {
    std::map<std::string, Kernel> all;
    while (next()) {
      if (line_.starts_with(".version") || line_.starts_with(".target") ||
          line_.starts_with(".address_size")) {
        continue;
      }
      const auto entry = line_.find(".entry ");
      if (entry == std::string::npos || !line_.ends_with('(')) fail("unknown statement");
      Kernel kernel = read_kernel(line_.substr(entry + 7, line_.size() - entry - 8));
      const std::string name = common_name(kernel.name);
      if (!all.emplace(name, std::move(kernel)).second) fail("a second kernel " + name);
    }
    return all;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw Fault(fmt::format("PTX, line {}: {}: {}", number_, what, line_));
  }

  bool next() {  // a line with something in it
    while (std::getline(in_, line_)) {
      ++number_;
      line_ = trimmed(line_.substr(0, line_.find("//")));
      if (!line_.empty()) return true;
    }
    return false;
  }

  Kernel read_kernel(const std::string& name) {
    kernel_ = {};
    kernel_.name = name;
    symbols_.clear(), registers_.clear(), constants_.clear(), labels_.clear(), branches_.clear();
    read_parameters();
    while (next() && line_ != "{") {
      if (!line_.starts_with(".maxntid ")) fail("unknown directive");
      kernel_.max_threads = static_cast<unsigned>(std::stoul(line_.substr(9)));
    }
    // Registers come first in a body; constants are numbered when they are met, and moved to the
    // front at the end.
    while (next() && line_ != "}") read_statement();
    finish();
    return std::move(kernel_);
  }

  // .param .u64 name   or   .shared .align 8 .b8 name[64]: lays it out behind what is there.
  struct Declared {
    std::string name;
    std::size_t at = 0, bytes = 0;
  };
  static Declared declare(const std::string& text, std::size_t& end) {
    std::istringstream words(text);
    std::string space, type;
    Declared d;
    std::size_t align = 0;
    words >> space >> type;
    if (type == ".align") words >> align >> type;
    words >> d.name;
    d.bytes = std::stoul(type.substr(2)) / 8;  // ".u64"
    if (align == 0) align = d.bytes;
    if (const auto bracket = d.name.find('['); bracket != std::string::npos) {
      d.bytes *= std::stoul(d.name.substr(bracket + 1));
      d.name.resize(bracket);
    }
    d.at = aligned(end, align);
    end = d.at + d.bytes;
    return d;
  }

  void read_parameters() {
    while (next() && line_ != ")") {
      if (!line_.starts_with(".param ")) fail("unknown parameter");
      if (line_.ends_with(',')) line_.pop_back();
      const Declared d = declare(line_, kernel_.parameter_bytes);
      kernel_.parameters.push_back({d.at, d.bytes});
      symbols_[d.name] = {Constant::Kind::kParam, d.at};
    }
  }
  void read_variable(const std::string& statement, Constant::Kind kind, std::size_t& bytes) {
    const Declared d = declare(statement, bytes);
    symbols_[d.name] = {kind, d.at};
  }

  void read_statement() {
    if (line_.ends_with(':')) {
      labels_[line_.substr(0, line_.size() - 1)] = static_cast<int>(kernel_.code.size());
      return;
    }
    if (!line_.ends_with(';')) fail("a statement that goes on in the next line");
    const std::string statement = trimmed(line_.substr(0, line_.size() - 1));
    if (statement.starts_with(".reg ")) return read_registers(statement);
    if (statement.starts_with(".shared ")) {
      return read_variable(statement, Constant::Kind::kShared, kernel_.shared_bytes);
    }
    if (statement.starts_with(".local ")) {
      return read_variable(statement, Constant::Kind::kLocal, kernel_.local_bytes);
    }
    if (statement.starts_with(".pragma ")) return;
    if (statement.starts_with('.')) fail("unknown directive");
    read_instruction(statement);
  }

  // .reg .b32 %r<55>   or   .reg .b64 %SP
  void read_registers(const std::string& statement) {
    std::string name = statement.substr(statement.find('%'));
    int count = 1;
    if (const auto bracket = name.find('<'); bracket != std::string::npos) {
      count = std::stoi(name.substr(bracket + 1));
      name.resize(bracket);
    }
    registers_[name] = kernel_.registers;
    kernel_.registers += count;
  }

  int register_of(const std::string& name) const {
    const auto digit = std::min(name.find_first_of("0123456789"), name.size());
    const auto found = registers_.find(name.substr(0, digit));
    if (found == registers_.end()) return -1;
    return found->second + (digit == name.size() ? 0 : std::stoi(name.substr(digit)));
  }

  // Negative until finish(): constant k is -2 - k.
  int slot_of(const std::string& operand) {
    using Kind = Constant::Kind;
    static const std::map<std::string, Kind> kSpecial = {{"%tid.x", Kind::kTid},
                                                         {"%ntid.x", Kind::kNtid},
                                                         {"%ctaid.x", Kind::kCtaidX},
                                                         {"%ctaid.y", Kind::kCtaidY},
                                                         {"%nctaid.x", Kind::kNctaidX}};
    if (const auto special = kSpecial.find(operand); special != kSpecial.end()) {
      return constant({special->second, 0});
    }
    if (operand.starts_with('%')) {
      const int at = register_of(operand);
      if (at < 0) fail("unknown register " + operand);
      return at;
    }
    if (const auto symbol = symbols_.find(operand); symbol != symbols_.end()) {
      return constant(symbol->second);
    }
    if (operand.starts_with("0f") || operand.starts_with("0d")) {
      return constant({Kind::kLiteral, std::stoull(operand.substr(2), nullptr, 16)});
    }
    std::size_t used = 0;
    std::uint64_t value = 0;
    try {
      value = operand.starts_with('-') ? static_cast<std::uint64_t>(std::stoll(operand, &used, 0))
                                       : std::stoull(operand, &used, 0);
    } catch (const std::exception&) {
    }
    if (used != operand.size()) fail("unknown operand " + operand);
    return constant({Kind::kLiteral, value});
  }
  int constant(Constant c) {
    const auto [at, added] = constants_.emplace(c, static_cast<int>(kernel_.constants.size()));
    if (added) kernel_.constants.push_back(c);
    return -2 - at->second;
  }

  void add_slot(Instruction& i, const std::string& operand) {
    if (i.count == static_cast<int>(i.slots.size())) fail("too many operands");
    i.slots[static_cast<std::size_t>(i.count++)] = slot_of(operand);
  }

  void read_instruction(std::string statement) {
    Instruction i;
    i.line = number_;
    i.text = statement;
    if (statement.starts_with('@')) {
      i.negated = statement[1] == '!';
      const auto space = statement.find_first_of(" \t");
      const std::size_t name = i.negated ? 2 : 1;
      i.guard = slot_of(statement.substr(name, space - name));
      statement = trimmed(statement.substr(space));
    }
    const auto space = std::min(statement.find_first_of(" \t"), statement.size());
    std::string opcode = statement.substr(0, space);
    const std::vector<std::string> operands = operands_of(statement.substr(space));
    const bool branch = opcode == "bra" || opcode == "bra.uni";
    for (std::size_t k = 0; k < operands.size(); ++k) {
      const std::string& operand = operands[k];
      if (branch) {
        branches_.emplace_back(kernel_.code.size(), operand);
      } else if (operand.starts_with('{')) {
        if (opcode == "mov.b32" || opcode == "mov.b64") {
          opcode = (k == 0 ? "unpack" : "pack") + opcode.substr(3);
        }
        for (const std::string& one : operands_of(operand.substr(1, operand.size() - 2))) {
          add_slot(i, one);
        }
      } else if (operand.starts_with('[')) {
        const std::string address = operand.substr(1, operand.size() - 2);
        const auto plus = address.find('+');
        add_slot(i, address.substr(0, plus));
        if (plus != std::string::npos) i.offset = std::stoll(address.substr(plus + 1));
      } else if (const auto bar = operand.find('|'); bar != std::string::npos) {
        add_slot(i, operand.substr(0, bar));
        add_slot(i, operand.substr(bar + 1));
      } else {
        add_slot(i, operand);
      }
    }
    i.space = take_space(opcode);
    const Entry entry = operation(opcode);
    if (entry.run == nullptr) fail("unknown instruction");
    if (entry.operands != i.count) fail("another number of operands");
    i.run = entry.run;
    i.meeting = entry.meeting;
    kernel_.code.push_back(std::move(i));
  }

  // Of loads, stores and atomics: their operation is the same in each.
  static Space take_space(std::string& opcode) {
    static const std::pair<const char*, Space> kSpaces[] = {{".global", Space::kGlobal},
                                                            {".shared", Space::kShared},
                                                            {".local", Space::kLocal},
                                                            {".param", Space::kParam}};
    if (!opcode.starts_with("ld.") && !opcode.starts_with("st.") && !opcode.starts_with("atom.")) {
      return Space::kGeneric;
    }
    for (const auto& [name, space] : kSpaces) {
      const auto at = opcode.find(name);
      if (at == std::string::npos) continue;
      opcode.erase(at, std::string(name).size());
      return space;
    }
    return Space::kGeneric;
  }

  void finish() {
    kernel_.local_bytes = aligned(kernel_.local_bytes, 16);
    const int constants = static_cast<int>(kernel_.constants.size());
    const auto final_slot = [&](int slot) { return slot <= -2 ? -2 - slot : slot + constants; };
    for (Instruction& i : kernel_.code) {
      if (i.guard != -1) i.guard = final_slot(i.guard);
      for (int k = 0; k < i.count; ++k) {
        int& slot = i.slots[static_cast<std::size_t>(k)];
        slot = final_slot(slot);
      }
    }
    for (const auto& [at, label] : branches_) {
      const auto target = labels_.find(label);
      if (target == labels_.end()) fail("unknown label " + label);
      kernel_.code[at].target = target->second;
    }
  }

  std::istringstream in_;
  std::string line_;
  int number_ = 0;
  Kernel kernel_;
  std::map<std::string, Constant> symbols_;
  std::map<std::string, int> registers_;  // by name without number: the first slot
  std::map<Constant, int> constants_;
  std::map<std::string, int> labels_;
  std::vector<std::pair<std::size_t, std::string>> branches_;
};

}  // namespace

std::map<std::string, Kernel> parse(const std::string& text) { return Parser(text).run(); }

// "..44_GLOBAL__N__68ec9a21_11_cuda_ops_cu_2bcb868e6copies.." without "44_GLOBAL_..868e".
std::string common_name(const std::string& mangled) {
  const auto global = mangled.find("_GLOBAL__N__");
  if (global == std::string::npos) return mangled;
  auto begin = global;
  while (begin > 0 && std::isdigit(static_cast<unsigned char>(mangled[begin - 1]))) --begin;
  const auto length = std::stoul(mangled.substr(begin, global - begin));
  return mangled.substr(0, begin) + mangled.substr(global + length);
}

}  // namespace zerofp8::test::ptx

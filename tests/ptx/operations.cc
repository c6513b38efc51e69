// What each instruction does. NaN of single precision is canonical, 0x7FFFFFFF, as the ISA says;
// of double precision it is some NaN.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
#include <string>
#include <type_traits>
#include <unordered_map>

#include "tests/ptx/machine.h"

namespace zerofp8::test::ptx {
namespace {

using Table = std::unordered_map<std::string, Entry>;

template <class T>
T canonical(T x) {
  if constexpr (std::is_same_v<T, float>) {
    return std::isnan(x) ? std::bit_cast<float>(0x7FFFFFFFu) : x;
  } else {
    return x;
  }
}

constexpr Entry entry(int operands, Operation run) { return {operands, run}; }

template <class T, auto F>
constexpr Entry unary = entry(2, [](Thread& t, const Instruction& i) {
  t.set(i, 0, static_cast<T>(F(t.get<T>(i, 1))));
});
template <class T, auto F>
constexpr Entry binary = entry(3, [](Thread& t, const Instruction& i) {
  t.set(i, 0, static_cast<T>(F(t.get<T>(i, 1), t.get<T>(i, 2))));
});
template <class T, auto F>
constexpr Entry ternary = entry(4, [](Thread& t, const Instruction& i) {
  t.set(i, 0, static_cast<T>(F(t.get<T>(i, 1), t.get<T>(i, 2), t.get<T>(i, 3))));
});
template <class T, auto F>
constexpr Entry compare = entry(3, [](Thread& t, const Instruction& i) {
  t.set(i, 0, static_cast<std::uint64_t>(F(t.get<T>(i, 1), t.get<T>(i, 2))));
});
template <class T>
constexpr Entry move = entry(2,
                             [](Thread& t, const Instruction& i) { t.set(i, 0, t.get<T>(i, 1)); });
template <class T>
constexpr Entry select = entry(4, [](Thread& t, const Instruction& i) {
  t.set(i, 0, t.get<T>(i, t.get<std::uint64_t>(i, 3) != 0 ? 1 : 2));
});
template <class To, class From>
constexpr Entry convert = entry(2, [](Thread& t, const Instruction& i) {
  t.set(i, 0, canonical(static_cast<To>(t.get<From>(i, 1))));
});

// ld.v4 d0, d1, d2, d3, address;  st.v4 address, s0, s1, s2, s3.
template <class T, int kCount>
constexpr Entry load = entry(kCount + 1, [](Thread& t, const Instruction& i) {
  const std::byte* from = t.memory(i, kCount, sizeof(T) * kCount);
  std::array<T, kCount> values;
  std::memcpy(values.data(), from, sizeof values);
  for (int k = 0; k < kCount; ++k) t.set(i, k, values[static_cast<std::size_t>(k)]);
});
template <class T, int kCount>
constexpr Entry store = entry(kCount + 1, [](Thread& t, const Instruction& i) {
  std::byte* to = t.memory(i, 0, sizeof(T) * kCount);
  std::array<T, kCount> values;
  for (int k = 0; k < kCount; ++k) values[static_cast<std::size_t>(k)] = t.get<T>(i, k + 1);
  std::memcpy(to, values.data(), sizeof values);
});
// Threads of one launch run one after the other; launches of other host threads may be at the same
// memory.
template <class T, auto F>
constexpr Entry atomic = entry(3, [](Thread& t, const Instruction& i) {
  std::atomic_ref<T> at(*reinterpret_cast<T*>(t.memory(i, 1, sizeof(T))));
  T before = at.load();
  while (!at.compare_exchange_weak(before, static_cast<T>(F(before, t.get<T>(i, 2))))) {
  }
  t.set(i, 0, before);
});

template <class Half, class Whole>
constexpr Entry pack = entry(3, [](Thread& t, const Instruction& i) {
  t.set(i, 0,
        static_cast<Whole>(t.get<Half>(i, 1) | static_cast<Whole>(t.get<Half>(i, 2))
                                                   << 8 * sizeof(Half)));
});
template <class Half, class Whole>
constexpr Entry unpack = entry(3, [](Thread& t, const Instruction& i) {
  const auto x = t.get<Whole>(i, 2);
  t.set(i, 0, static_cast<Half>(x));
  t.set(i, 1, static_cast<Half>(x >> 8 * sizeof(Half)));
});

// Shifts by more than the width leave 0 or the sign.
template <class T>
constexpr Entry shift_left = entry(3, [](Thread& t, const Instruction& i) {
  const auto by = t.get<std::uint32_t>(i, 2);
  t.set(i, 0, static_cast<T>(by >= 8 * sizeof(T) ? 0 : t.get<T>(i, 1) << by));
});
template <class T>
constexpr Entry shift_right = entry(3, [](Thread& t, const Instruction& i) {
  constexpr std::uint32_t kMost = 8 * sizeof(T) - 1;
  const auto by = t.get<std::uint32_t>(i, 2);
  const auto x = t.get<T>(i, 1);
  t.set(i, 0, static_cast<T>(by <= kMost ? x >> by : std::is_signed_v<T> ? x >> kMost : T{0}));
});

template <class Wide, class T>
constexpr Entry multiply_wide = entry(3, [](Thread& t, const Instruction& i) {
  t.set(i, 0,
        static_cast<Wide>(static_cast<Wide>(t.get<T>(i, 1)) * static_cast<Wide>(t.get<T>(i, 2))));
});

// Default mode: four bytes out of eight, or the sign of one in all bits.
constexpr Entry permute = entry(4, [](Thread& t, const Instruction& i) {
  const std::uint64_t from = t.get<std::uint32_t>(i, 1) | std::uint64_t{t.get<std::uint32_t>(i, 2)}
                                                              << 32;
  const auto selector = t.get<std::uint32_t>(i, 3);
  std::uint32_t result = 0;
  for (unsigned k = 0; k < 4; ++k) {
    const std::uint32_t s = selector >> 4 * k;
    auto byte = static_cast<std::uint32_t>(from >> 8 * (s & 7)) & 0xFF;
    if ((s & 8) != 0) byte = (byte & 0x80) != 0 ? 0xFF : 0;
    result |= byte << 8 * k;
  }
  t.set(i, 0, result);
});

// Saturates; NaN is 0.
constexpr Entry float_to_int = entry(2, [](Thread& t, const Instruction& i) {
  using Limits = std::numeric_limits<std::int32_t>;
  const double x = std::trunc(static_cast<double>(t.get<float>(i, 1)));
  t.set(i, 0,
        std::isnan(x)        ? 0
        : x <= Limits::min() ? Limits::min()
        : x >= Limits::max() ? Limits::max()
                             : static_cast<std::int32_t>(x));
});

// The machine does what there is to do when all have met.
constexpr Entry meet(Meeting meeting, int operands) {
  return {operands, [](Thread& t, const Instruction&) { t.state = Thread::State::kWaiting; },
          meeting};
}

constexpr auto kAdd = [](auto a, auto b) { return canonical(a + b); };
constexpr auto kSub = [](auto a, auto b) { return canonical(a - b); };
constexpr auto kMul = [](auto a, auto b) { return canonical(a * b); };
constexpr auto kDiv = [](auto a, auto b) { return canonical(a / b); };
constexpr auto kSqrt = [](auto a) { return canonical(std::sqrt(a)); };
constexpr auto kRcp = [](auto a) { return canonical(1 / a); };
constexpr auto kFma = [](auto a, auto b, auto c) { return canonical(std::fma(a, b, c)); };
// Of unsigned numbers; 16 bits would be multiplied as int.
constexpr auto kMulWrap = [](auto a, auto b) { return 1u * a * b; };
constexpr auto kMulAdd = [](auto a, auto b, auto c) { return 1u * a * b + c; };
constexpr auto kNeg = [](auto a) { return -a; };
constexpr auto kAbs = [](auto a) { return std::fabs(a); };
constexpr auto kNot = [](auto a) { return ~a; };
constexpr auto kIsTrue = [](auto a) { return a != 0; };
constexpr auto kIsFalse = [](auto a) { return a == 0; };
constexpr auto kBoth = [](auto a, auto b) { return a != 0 && b != 0; };
constexpr auto kEither = [](auto a, auto b) { return a != 0 || b != 0; };
constexpr auto kOneOf = [](auto a, auto b) { return (a != 0) != (b != 0); };
constexpr auto kAnd = [](auto a, auto b) { return a & b; };
constexpr auto kOr = [](auto a, auto b) { return a | b; };
constexpr auto kXor = [](auto a, auto b) { return a ^ b; };
constexpr auto kMin = [](auto a, auto b) { return b < a ? b : a; };
constexpr auto kMax = [](auto a, auto b) { return a < b ? b : a; };
// The number where one is NaN; -0 is less than +0.
constexpr auto kMinFloat = [](auto a, auto b) {
  if (std::isnan(a) || std::isnan(b)) return canonical(std::isnan(a) ? b : a);
  return a == b ? (std::signbit(a) ? a : b) : std::min(a, b);
};
constexpr auto kMaxFloat = [](auto a, auto b) {
  if (std::isnan(a) || std::isnan(b)) return canonical(std::isnan(a) ? b : a);
  return a == b ? (std::signbit(a) ? b : a) : std::max(a, b);
};

template <auto F>
constexpr auto kOrUnordered = [](auto a, auto b) { return a != a || b != b || F(a, b); };
template <auto F>
constexpr auto kOrdered = [](auto a, auto b) { return a == a && b == b && F(a, b); };
constexpr auto kEq = [](auto a, auto b) { return a == b; };
constexpr auto kNe = [](auto a, auto b) { return a != b; };
constexpr auto kLt = [](auto a, auto b) { return a < b; };
constexpr auto kLe = [](auto a, auto b) { return a <= b; };
constexpr auto kGt = [](auto a, auto b) { return a > b; };
constexpr auto kGe = [](auto a, auto b) { return a >= b; };

template <class T>
void add_memory(Table& table, const std::string& type) {
  table["ld." + type] = load<T, 1>;
  table["ld.v2." + type] = load<T, 2>;
  table["st." + type] = store<T, 1>;
  table["st.v2." + type] = store<T, 2>;
  if constexpr (sizeof(T) <= 4) {
    table["ld.v4." + type] = load<T, 4>;
    table["st.v4." + type] = store<T, 4>;
  }
}

template <class T>
void add_compares(Table& table, const std::string& type) {
  table["setp.eq." + type] = compare<T, kEq>;
  table["setp.ne." + type] = compare<T, kOrdered<kNe>>;
  table["setp.lt." + type] = compare<T, kLt>;
  table["setp.le." + type] = compare<T, kLe>;
  table["setp.gt." + type] = compare<T, kGt>;
  table["setp.ge." + type] = compare<T, kGe>;
}

// Bits: u32 and b32.
template <class T>
void add_bits(Table& table, const std::string& width) {
  for (const char* kind : {"b", "u", "s"}) {
    table["mov." + (kind + width)] = move<T>;
    table["selp." + (kind + width)] = select<T>;
  }
  table["and.b" + width] = binary<T, kAnd>;
  table["or.b" + width] = binary<T, kOr>;
  table["xor.b" + width] = binary<T, kXor>;
  table["not.b" + width] = unary<T, kNot>;
  table["shl.b" + width] = shift_left<T>;
  add_compares<T>(table, "b" + width);
  add_memory<T>(table, "b" + width);
}

// `Wrap`: arithmetic that wraps is that of unsigned numbers, for both.
template <class T>
void add_integers(Table& table, const std::string& type) {
  using Wrap = std::make_unsigned_t<T>;
  table["add." + type] = binary<Wrap, kAdd>;
  table["sub." + type] = binary<Wrap, kSub>;
  table["mul.lo." + type] = binary<Wrap, kMulWrap>;
  table["mad.lo." + type] = ternary<Wrap, kMulAdd>;
  table["neg." + type] = unary<Wrap, kNeg>;
  table["min." + type] = binary<T, kMin>;
  table["max." + type] = binary<T, kMax>;
  table["shr." + type] = shift_right<T>;
  add_compares<T>(table, type);
  add_memory<T>(table, type);
  if constexpr (sizeof(T) >= 4) {
    table["atom.add." + type] = atomic<Wrap, kAdd>;
    table["atom.min." + type] = atomic<T, kMin>;
    table["atom.max." + type] = atomic<T, kMax>;
  }
}

template <class T>
void add_floats(Table& table, const std::string& type) {
  table["mov." + type] = move<T>;
  table["selp." + type] = select<T>;
  table["add.rn." + type] = binary<T, kAdd>;
  table["sub.rn." + type] = binary<T, kSub>;
  table["mul.rn." + type] = binary<T, kMul>;
  table["div.rn." + type] = binary<T, kDiv>;
  table["fma.rn." + type] = ternary<T, kFma>;
  table["sqrt.rn." + type] = unary<T, kSqrt>;
  table["rcp.rn." + type] = unary<T, kRcp>;
  table["neg." + type] = unary<T, kNeg>;
  table["abs." + type] = unary<T, kAbs>;
  table["min." + type] = binary<T, kMinFloat>;
  table["max." + type] = binary<T, kMaxFloat>;
  add_compares<T>(table, type);
  table["setp.equ." + type] = compare<T, kOrUnordered<kEq>>;
  table["setp.neu." + type] = compare<T, kNe>;
  table["setp.ltu." + type] = compare<T, kOrUnordered<kLt>>;
  table["setp.leu." + type] = compare<T, kOrUnordered<kLe>>;
  table["setp.gtu." + type] = compare<T, kOrUnordered<kGt>>;
  table["setp.geu." + type] = compare<T, kOrUnordered<kGe>>;
  add_memory<T>(table, type);
}

template <class From>
void add_conversions(Table& table, const std::string& from) {
  table["cvt.u16." + from] = convert<std::uint16_t, From>;
  table["cvt.s16." + from] = convert<std::int16_t, From>;
  table["cvt.u32." + from] = convert<std::uint32_t, From>;
  table["cvt.s32." + from] = convert<std::int32_t, From>;
  table["cvt.u64." + from] = convert<std::uint64_t, From>;
  table["cvt.s64." + from] = convert<std::int64_t, From>;
  table["cvt.rn.f32." + from] = convert<float, From>;
  table["cvt.rn.f64." + from] = convert<double, From>;
}

Table make_table() {
  Table table;
  add_bits<std::uint16_t>(table, "16");
  add_bits<std::uint32_t>(table, "32");
  add_bits<std::uint64_t>(table, "64");
  add_memory<std::uint8_t>(table, "u8");
  add_memory<std::uint8_t>(table, "b8");
  add_integers<std::uint16_t>(table, "u16");
  add_integers<std::int16_t>(table, "s16");
  add_integers<std::uint32_t>(table, "u32");
  add_integers<std::int32_t>(table, "s32");
  add_integers<std::uint64_t>(table, "u64");
  add_integers<std::int64_t>(table, "s64");
  add_floats<float>(table, "f32");
  add_floats<double>(table, "f64");
  add_conversions<std::uint16_t>(table, "u16");
  add_conversions<std::int16_t>(table, "s16");
  add_conversions<std::uint32_t>(table, "u32");
  add_conversions<std::int32_t>(table, "s32");
  add_conversions<std::uint64_t>(table, "u64");
  add_conversions<std::int64_t>(table, "s64");
  table["cvt.rn.f32.f64"] = convert<float, double>;
  table["cvt.f64.f32"] = convert<double, float>;
  table["cvt.rzi.s32.f32"] = float_to_int;
  table["mul.wide.u32"] = multiply_wide<std::uint64_t, std::uint32_t>;
  table["mul.wide.s32"] = multiply_wide<std::int64_t, std::int32_t>;
  table["mul.wide.u16"] = multiply_wide<std::uint32_t, std::uint16_t>;
  table["mul.wide.s16"] = multiply_wide<std::int32_t, std::int16_t>;
  table["prmt.b32"] = permute;
  table["pack.b32"] = pack<std::uint16_t, std::uint32_t>;
  table["pack.b64"] = pack<std::uint32_t, std::uint64_t>;
  table["unpack.b32"] = unpack<std::uint16_t, std::uint32_t>;
  table["unpack.b64"] = unpack<std::uint32_t, std::uint64_t>;
  // A true one that is written out is -1.
  table["mov.pred"] = unary<std::uint64_t, kIsTrue>;
  table["and.pred"] = binary<std::uint64_t, kBoth>;
  table["or.pred"] = binary<std::uint64_t, kEither>;
  table["xor.pred"] = binary<std::uint64_t, kOneOf>;
  table["not.pred"] = unary<std::uint64_t, kIsFalse>;
  // Addresses are the host's.
  table["cvta.to.global.u64"] = move<std::uint64_t>;
  table["cvta.local.u64"] = move<std::uint64_t>;
  for (const char* name : {"bra", "bra.uni"}) {
    table[name] = {0, [](Thread& t, const Instruction& i) { t.pc = i.target; }};
  }
  table["ret"] = {0, [](Thread& t, const Instruction&) { t.state = Thread::State::kExited; }};
  table["bar.sync"] = meet(Meeting::kBarrier, 1);
  table["shfl.sync.down.b32"] = meet(Meeting::kShuffleDown, 6);
  table["shfl.sync.bfly.b32"] = meet(Meeting::kShuffleBfly, 6);
  table["redux.sync.max.u32"] = meet(Meeting::kReduceMax, 3);
  return table;
}

}  // namespace

Entry operation(const std::string& opcode) {
  static const Table table = make_table();
  const auto found = table.find(opcode);
  return found == table.end() ? Entry{} : found->second;
}

}  // namespace zerofp8::test::ptx

// The machine against values of the PTX ISA's text, worked out by hand, and what it has to refuse.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "tests/messages.h"
#include "tests/ptx/machine.h"

namespace zerofp8::test::ptx {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// A kernel of one parameter, an address, with `body` between its registers and `ret`.
Kernel kernel_of(const std::string& body, const std::string& directives = "") {
  const std::string text = fmt::format(R"(
.version 9.0
.target sm_80
.address_size 64

.entry _ZN4test39_GLOBAL__N__252b93a1_9_test_cu_4dd6b5aa1kEv(
	.param .u64 address
)
{}
{{
	.reg .pred 	%p<8>;
	.reg .b16 	%rs<8>;
	.reg .f32 	%f<8>;
	.reg .b32 	%r<16>;
	.reg .f64 	%fd<8>;
	.reg .b64 	%rd<8>;
	.shared .align 4 .b8 shared[256];
	ld.param.u64 	%rd1, [address];
	cvta.to.global.u64 	%rd1, %rd1;
	mov.u32 	%r1, %tid.x;
{}
	ret;
}}
)",
                                       directives, body);
  return parse(text).begin()->second;
}

void run_on(std::span<std::uint32_t> memory, const Kernel& kernel, unsigned threads = 1,
            unsigned seed = 1, unsigned grid = 1) {
  const auto begin = reinterpret_cast<std::uintptr_t>(memory.data());
  const Region regions[] = {{begin, memory.size_bytes()}};
  void* address = memory.data();
  void* arguments[] = {&address};
  run(kernel, {.grid_x = grid,
               .threads = threads,
               .arguments = arguments,
               .regions = regions,
               .seed = seed});
}

// One instruction of 32-bit operands: `%r0, %r1, ..` stand for the result and the operands.
std::uint32_t result_of(const std::string& opcode, std::vector<std::uint32_t> operands) {
  std::string body, list = "%r0";
  for (std::size_t k = 0; k < operands.size(); ++k) {
    body += fmt::format("\tmov.b32 \t%r{}, {};\n", k + 2, operands[k]);
    list += fmt::format(", %r{}", k + 2);
  }
  body += fmt::format("\t{} \t{};\n\tst.global.u32 \t[%rd1], %r0;\n", opcode, list);
  std::uint32_t memory[1] = {};
  run_on(memory, kernel_of(body));
  return memory[0];
}
std::uint32_t result_of_floats(const std::string& opcode, const std::vector<float>& operands) {
  std::vector<std::uint32_t> bits;
  for (const float x : operands) bits.push_back(std::bit_cast<std::uint32_t>(x));
  return result_of(opcode, bits);
}
std::uint32_t bits(float x) { return std::bit_cast<std::uint32_t>(x); }

TEST(PtxMachine, Integers) {
  EXPECT_EQ(result_of("add.s32", {0x7FFFFFFF, 1}), 0x80000000u);
  EXPECT_EQ(result_of("sub.s32", {0, 1}), 0xFFFFFFFFu);
  EXPECT_EQ(result_of("mul.lo.s32", {0x10001, 0x10001}), 0x20001u);
  EXPECT_EQ(result_of("mad.lo.s32", {3, 5, 0xFFFFFFFF}), 14u);
  EXPECT_EQ(result_of("min.s32", {0xFFFFFFFF, 1}), 0xFFFFFFFFu);
  EXPECT_EQ(result_of("min.u32", {0xFFFFFFFF, 1}), 1u);
  EXPECT_EQ(result_of("max.s32", {0xFFFFFFFF, 1}), 1u);
  EXPECT_EQ(result_of("max.u32", {0xFFFFFFFF, 1}), 0xFFFFFFFFu);
  EXPECT_EQ(result_of("neg.s32", {5}), 0xFFFFFFFBu);
  EXPECT_EQ(result_of("not.b32", {0xF0F0F0F0}), 0x0F0F0F0Fu);
  EXPECT_EQ(result_of("shl.b32", {1, 31}), 0x80000000u);
  EXPECT_EQ(result_of("shl.b32", {1, 32}), 0u);
  EXPECT_EQ(result_of("shr.u32", {0x80000000, 31}), 1u);
  EXPECT_EQ(result_of("shr.u32", {0x80000000, 32}), 0u);
  EXPECT_EQ(result_of("shr.s32", {0x80000000, 31}), 0xFFFFFFFFu);
  EXPECT_EQ(result_of("shr.s32", {0x80000000, 40}), 0xFFFFFFFFu);
  EXPECT_EQ(result_of("prmt.b32", {0x33221100, 0x77665544, 0x7531}), 0x77553311u);
  EXPECT_EQ(result_of("prmt.b32", {0x000080F0, 0, 0x3A81}), 0x0000FF80u) << "bit 3: the sign";
}

TEST(PtxMachine, Floats) {
  EXPECT_EQ(result_of_floats("add.rn.f32", {1.0f, 0x1p-24f}), bits(1.0f)) << "ties to even";
  EXPECT_EQ(result_of_floats("add.rn.f32", {1.0f, 0x1.8p-24f}), bits(1.0f + 0x1p-23f));
  EXPECT_EQ(result_of_floats("mul.rn.f32", {0x1p-100f, 0x1p-49f}), 1u) << "subnormals are kept";
  EXPECT_EQ(result_of_floats("fma.rn.f32", {1 + 0x1p-12f, 1 + 0x1p-12f, -1 - 0x1p-11f}),
            bits(0x1p-24f))
      << "one rounding";
  EXPECT_EQ(result_of_floats("div.rn.f32", {1.0f, 3.0f}), 0x3EAAAAABu);
  EXPECT_EQ(result_of_floats("sqrt.rn.f32", {2.0f}), 0x3FB504F3u);
  EXPECT_EQ(result_of_floats("neg.f32", {0.0f}), 0x80000000u);
  for (const auto& [opcode, operands] :
       {std::pair<const char*, std::vector<float>>{"add.rn.f32", {INFINITY, -INFINITY}},
        {"mul.rn.f32", {0.0f, INFINITY}},
        {"sqrt.rn.f32", {-1.0f}},
        {"fma.rn.f32", {1.0f, -kNan, 1.0f}}}) {
    EXPECT_EQ(result_of_floats(opcode, operands), 0x7FFFFFFFu) << opcode;
  }
  EXPECT_EQ(result_of_floats("max.f32", {kNan, 1.0f}), bits(1.0f));
  EXPECT_EQ(result_of_floats("max.f32", {-0.0f, 0.0f}), bits(0.0f));
  EXPECT_EQ(result_of_floats("min.f32", {0.0f, -0.0f}), bits(-0.0f));
}

TEST(PtxMachine, Conversions) {
  EXPECT_EQ(result_of_floats("cvt.rzi.s32.f32", {-2.9f}), 0xFFFFFFFEu);
  EXPECT_EQ(result_of_floats("cvt.rzi.s32.f32", {3e9f}), 0x7FFFFFFFu);
  EXPECT_EQ(result_of_floats("cvt.rzi.s32.f32", {-INFINITY}), 0x80000000u);
  EXPECT_EQ(result_of_floats("cvt.rzi.s32.f32", {kNan}), 0u);
  EXPECT_EQ(result_of("cvt.rn.f32.s32", {0xFFFFFFFF}), bits(-1.0f));
  EXPECT_EQ(result_of("cvt.rn.f32.s32", {(1u << 24) + 1}), bits(0x1p24f));
  EXPECT_EQ(result_of("cvt.u32.u16", {0xABCD1234}), 0x1234u);
  EXPECT_EQ(result_of("cvt.s32.s16", {0x8000}), 0xFFFF8000u);
}

TEST(PtxMachine, ComparesOrderedAndNot) {
  const auto holds = [](const std::string& relation, float a, float b) {
    std::uint32_t memory[1] = {};
    run_on(memory, kernel_of(fmt::format("\tsetp.{}.f32 \t%p1, 0f{:08X}, 0f{:08X};\n"
                                         "\tselp.u32 \t%r2, 1, 0, %p1;\n"
                                         "\tst.global.u32 \t[%rd1], %r2;\n",
                                         relation, bits(a), bits(b))));
    return memory[0] == 1;
  };
  EXPECT_TRUE(holds("lt", 1, 2));
  EXPECT_FALSE(holds("lt", 2, 2));
  EXPECT_TRUE(holds("eq", 0.0f, -0.0f));
  for (const char* relation : {"eq", "ne", "lt", "le", "gt", "ge"}) {
    EXPECT_FALSE(holds(relation, kNan, 1)) << relation;
  }
  for (const char* relation : {"equ", "neu", "ltu", "leu", "gtu", "geu"}) {
    EXPECT_TRUE(holds(relation, 1, kNan)) << relation;
  }
  EXPECT_FALSE(holds("ltu", 2, 2));
}

TEST(PtxMachine, WideValuesAreOfHalves) {
  std::uint32_t memory[4] = {};
  run_on(memory, kernel_of(R"(
	mul.wide.s32 	%rd2, -2, 3;
	mov.b64 {%r2,%r3}, %rd2;
	mov.b32 	%r4, 305419896;
	mov.b32 	{%rs1, %rs2}, %r4;
	mov.b32 	%r5, {%rs2, %rs1};
	mov.b64 	%rd3, {%r3, %r5};
	shr.u64 	%rd3, %rd3, 32;
	cvt.u32.u64 	%r6, %rd3;
	st.global.v4.u32 	[%rd1], {%r2, %r3, %r5, %r6};)"));
  EXPECT_EQ(memory[0], 0xFFFFFFFAu);
  EXPECT_EQ(memory[1], 0xFFFFFFFFu);
  EXPECT_EQ(memory[2], 0x56781234u);
  EXPECT_EQ(memory[3], 0x56781234u);
}

TEST(PtxMachine, SignsFillWiderRegistersAndPredicatesAreTrueOrFalse) {
  std::uint32_t memory[4] = {};
  run_on(memory, kernel_of(R"(
	mov.u32 	%r2, -2;
	st.global.u32 	[%rd1], %r2;
	ld.global.s32 	%rd2, [%rd1];
	shr.u64 	%rd3, %rd2, 40;
	cvt.u32.u64 	%r3, %rd3;
	ld.global.s16 	%r4, [%rd1];
	mov.pred 	%p1, -1;
	setp.eq.s32 	%p2, %r2, -2;
	xor.pred 	%p3, %p1, %p2;
	selp.u32 	%r5, 1, 0, %p3;
	st.global.v4.u32 	[%rd1], {%r2, %r3, %r4, %r5};)"));
  EXPECT_EQ(memory[1], 0x00FFFFFFu);
  EXPECT_EQ(memory[2], 0xFFFFFFFEu);
  EXPECT_EQ(memory[3], 0u);
}

std::string shuffled(const std::string& instruction) {
  return "\tmul.wide.u32 \t%rd2, %r1, 4;\n\tadd.s64 \t%rd3, %rd1, %rd2;\n\t" + instruction +
         "\n\tst.global.u32 \t[%rd3], %r2;\n";
}

// Each thread has its own, whatever its size.
TEST(PtxMachine, LocalMemoryIsApart) {
  std::vector<std::uint32_t> memory(64);
  run_on(memory, kernel_of(R"(
	.local .align 4 .b8 depot[12];
	mov.u64 	%rd4, depot;
	st.local.u32 	[%rd4+8], %r1;
	st.local.u32 	[%rd4], %r1;
	bar.sync 	0;
)" + shuffled("ld.local.u32 \t%r2, [%rd4+8];")),
         64);
  for (std::uint32_t i = 0; i < 64; ++i) EXPECT_EQ(memory[i], i);
}

TEST(PtxMachine, LanesAskEachOther) {
  std::vector<std::uint32_t> memory(64);
  run_on(memory, kernel_of(shuffled("shfl.sync.bfly.b32 \t%r2|%p1, %r1, 4, 31, -1;")), 64);
  for (std::uint32_t i = 0; i < 64; ++i) EXPECT_EQ(memory[i], i ^ 4);
  // Segments of 8 lanes, as __shfl_down_sync(.., 2, 8) makes them: (32 - 8) << 8 | 31.
  run_on(memory, kernel_of(shuffled("shfl.sync.down.b32 \t%r2|%p1, %r1, 2, 6175, -1;")), 64);
  for (std::uint32_t i = 0; i < 64; ++i) EXPECT_EQ(memory[i], i % 8 < 6 ? i + 2 : i);
  run_on(memory, kernel_of(shuffled("redux.sync.max.u32 \t%r2, %r1, -1;")), 64);
  for (std::uint32_t i = 0; i < 64; ++i) EXPECT_EQ(memory[i], i / 32 * 32 + 31);
}

// Each thread reads what its neighbour wrote: right only behind a barrier, whatever the order.
TEST(PtxMachine, OrderBetweenBarriersIsAnyOrder) {
  const auto wrong = [](const std::string& barrier) {
    int count = 0;
    for (unsigned seed = 1; seed <= 20; ++seed) {
      std::vector<std::uint32_t> memory(64);
      run_on(memory, kernel_of(R"(
	shl.b32 	%r3, %r1, 2;
	mov.u32 	%r4, shared;
	add.s32 	%r5, %r4, %r3;
	st.shared.u32 	[%r5], %r1;
)" + barrier + R"(
	xor.b32 	%r3, %r3, 132;
	add.s32 	%r5, %r4, %r3;
)" + shuffled("ld.shared.u32 \t%r2, [%r5];")),
             64, seed);
      for (std::uint32_t i = 0; i < 64; ++i) count += memory[i] != (i ^ 33);
    }
    return count;
  };
  EXPECT_EQ(wrong("\tbar.sync \t0;"), 0);
  EXPECT_GT(wrong(""), 200);
}

TEST(PtxMachine, AtomicsAndBlocks) {
  std::vector<std::uint32_t> memory(2);
  run_on(memory, kernel_of(R"(
	mov.u32 	%r2, %ctaid.x;
	mov.u32 	%r3, %nctaid.x;
	mad.lo.s32 	%r4, %r2, %r3, %r1;
	atom.global.add.u32 	%r5, [%rd1], 1;
	atom.global.max.u32 	%r5, [%rd1+4], %r4;)"),
         40, 1, 3);
  EXPECT_EQ(memory[0], 120u);
  EXPECT_EQ(memory[1], 2u * 3 + 39);
}

std::string fault_in(const std::string& body, unsigned threads = 1) {
  std::vector<std::uint32_t> memory(64);
  return message_of([&] { run_on(memory, kernel_of(body), threads); });
}

TEST(PtxMachine, FaultsNameTheInstruction) {
  const std::string beyond = fault_in("\tld.global.u32 \t%r2, [%rd1+256];");
  expect_contains(beyond, "4 bytes at");
  expect_contains(beyond, "are not the kernel's; PTX, line 21: ld.global.u32 \t%r2, [%rd1+256]");
  expect_contains(fault_in("\tst.global.u32 \t[%rd1+-4], %r1;"), "are not the kernel's");
  expect_contains(fault_in("\tld.global.v2.u32 \t{%r2, %r3}, [%rd1+252];"), "not aligned to 8");
  expect_contains(fault_in("\tld.shared.u32 \t%r2, [shared+256];"), "outside of shared memory");
  expect_contains(fault_in("\tld.shared.u32 \t%r2, [shared+-4];"), "outside of shared memory");
  expect_contains(fault_in("\tmov.u64 \t%rd2, 0;\n\tld.global.u32 \t%r2, [%rd2+-4];"),
                  "are not the kernel's");
  expect_contains(fault_in("\tld.param.u64 \t%rd2, [address+8];"), "are not the kernel's");
  expect_contains(fault_in("\tld.param.u32 \t%r2, [%rd1];"), "are not the kernel's");
  expect_contains(fault_in("\tmma.sync \t%r2, %r3;"), "PTX, line 21: unknown instruction");
  expect_contains(fault_in("\tadd.s32 \t%r2, %x3, 1;"), "unknown register %x3");
  expect_contains(fault_in("\tsetp.lt.s32 \t%p1|%p2, %r1, 1;"), "another number of operands");
  expect_contains(fault_in("\tbra \t$L__nowhere;"), "unknown label $L__nowhere");
  // Thread 0 goes another way.
  const std::string guard = "\tsetp.eq.s32 \t%p1, %r1, 0;\n";
  expect_contains(fault_in(guard + "\t@%p1 bra \t$L1;\n\tbar.sync \t0;\n\tbra.uni \t$L2;\n$L1:\n"
                                   "\tbar.sync \t0;\n$L2:",
                           64),
                  "not all threads are at one barrier");
  expect_contains(
      fault_in(guard + "\t@%p1 bra \t$L1;\n\tredux.sync.max.u32 \t%r2, %r1, -1;\n\tbra.uni "
                       "\t$L2;\n$L1:\n\tbar.sync \t0;\n$L2:",
               64),
      "not all lanes are here");
  expect_contains(
      fault_in(guard + "\t@%p1 bra \t$L1;\n\tshfl.sync.bfly.b32 \t%r2|%p2, %r1, 1, 31, -1;\n"
                       "$L1:",
               32),
      "the lane that is asked has ended");
  expect_contains(fault_in("\tredux.sync.max.u32 \t%r2, %r1, 1;", 32), "lanes outside of the mask");
  std::vector<std::uint32_t> memory(1);
  expect_contains(message_of([&] { run_on(memory, kernel_of("", ".maxntid 32, 1, 1"), 64); }),
                  "64 threads, 32 at most");
}

TEST(PtxMachine, NamesWithoutTheFile) {
  EXPECT_EQ(common_name("_ZN4test39_GLOBAL__N__252b93a1_9_test_cu_4dd6b5aa1kEv"), "_ZN4test1kEv");
  EXPECT_EQ(common_name("_ZN4test1kEv"), "_ZN4test1kEv");
}

}  // namespace
}  // namespace zerofp8::test::ptx

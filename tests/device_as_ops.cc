#include "tests/device_as_ops.h"

#include <cmath>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "src/optim/exact_sum.h"
#include "tests/emulated_device.h"

namespace zerofp8::test {
namespace {

constexpr int kMaxDevices = 4;
const std::vector<std::unique_ptr<Device>>& devices() {
  static const std::vector<std::unique_ptr<Device>> all = make_devices_under_test(false);
  return all;
}
Device& device(int index) { return *devices().at(static_cast<std::size_t>(index)); }

// A copy of host memory on a device.
class Copy {
 public:
  Copy(Device& d, const void* host, std::size_t bytes, std::size_t padded = 0)
      : device_(d),
        bytes_(bytes),
        memory_(d.allocator(), Component::kTransient, std::max(bytes, padded) + 16) {
    d.zero(memory_.data(), memory_.size());
    if (bytes != 0) d.upload(memory_.data(), host, bytes);
  }
  void* data() { return memory_.data(); }
  void download(void* host) {
    if (bytes_ != 0) device_.download(host, memory_.data(), bytes_);
  }

 private:
  Device& device_;
  std::size_t bytes_;
  Buffer memory_;
};

std::size_t whole(std::int64_t n, int block) {
  return static_cast<std::size_t>((n + block - 1) / block * block);
}

class ViewCopy {
 public:
  ViewCopy(Device& d, const View& host, std::int64_t n, int block)
      : host_(host),
        codes_(d, host.codes, host ? static_cast<std::size_t>(n * bytes_of(host.storage)) : 0,
               whole(n, block) * static_cast<std::size_t>(bytes_of(host.storage))),
        scales_(d, host.scales, scale_bytes(n, block)) {}
  View view() {
    if (!host_) return {};
    return {host_.storage, codes_.data(),
            is_block(host_.storage) ? static_cast<float*>(scales_.data()) : nullptr};
  }
  void download() {
    if (!host_) return;
    codes_.download(host_.codes);
    scales_.download(host_.scales);
  }

 private:
  std::size_t scale_bytes(std::int64_t n, int block) const {
    const bool any = host_ && is_block(host_.storage);
    return any ? static_cast<std::size_t>(n / block) * sizeof(float) : 0;
  }
  View host_;
  Copy codes_, scales_;
};

class Amax {
 public:
  explicit Amax(Device& d) : copy_(d, nullptr, 0, sizeof(std::uint32_t)), device_(d) {}
  std::uint32_t* pointer() { return static_cast<std::uint32_t*>(copy_.data()); }
  std::uint32_t value() {
    std::uint32_t x;
    device_.download(&x, copy_.data(), sizeof x);
    return x;
  }

 private:
  Copy copy_;
  Device& device_;
};

template <int kDevice>
struct Table {
  static std::uint32_t recode(View in, View out, std::int64_t n, int block, Rounding rounding,
                              RandomStream stream) {
    Device& d = device(kDevice);
    ViewCopy from(d, in, n, block), to(d, out, n, block);
    Amax amax(d);
    d.recode({.in = {.part = from.view(), .residual = {}},
              .out = to.view(),
              .elements = n,
              .block = block,
              .rounding = rounding,
              .stream = stream,
              .amax = amax.pointer()});
    to.download();
    return amax.value();
  }
  static std::uint32_t encode(const float* x, View out, std::int64_t n, int block,
                              Rounding rounding, RandomStream stream) {
    return recode({Storage::kFp32, const_cast<float*>(x), nullptr}, out, n, block, rounding,
                  stream);
  }
  static void decode(View in, float* out, std::int64_t n, int block) {
    recode(in, {Storage::kFp32, out, nullptr}, n, block, Rounding::kNearest, {});
  }

  static std::uint32_t accumulate(View acc, View residual, View gradient, std::int64_t n, int block,
                                  Rounding rounding, RandomStream stream) {
    Device& d = device(kDevice);
    ViewCopy a(d, acc, n, block), r(d, residual, n, block), g(d, gradient, n, block);
    Amax amax(d);
    d.accumulate({.acc = a.view(),
                  .residual = r.view(),
                  .gradient = g.view(),
                  .sum = {},
                  .elements = n,
                  .block = block,
                  .rounding = rounding,
                  .stream = stream,
                  .amax = amax.pointer()});
    a.download();
    r.download();
    return amax.value();
  }

  // Parts have to lie at equal distances: they are copied there.
  static std::uint32_t decode_sum(const View* parts, const View* residuals, int count, float factor,
                                  float* out, std::int64_t n, int block) {
    Device& d = device(kDevice);
    const auto codes = static_cast<std::int64_t>(whole(n, block)) * bytes_of(parts[0].storage);
    const std::int64_t half = codes + static_cast<std::int64_t>(whole(n, block)) / block * 4;
    const std::int64_t part_bytes = 2 * half + (16 - 2 * half % 16) % 16;
    Copy memory(d, nullptr, 0, static_cast<std::size_t>(part_bytes * count + half));
    const auto place = [&](const View& v, std::int64_t at) {
      char* base = static_cast<char*>(memory.data()) + at;
      d.upload(base, v.codes, static_cast<std::size_t>(codes));
      if (!is_block(v.storage)) return View{v.storage, base, nullptr};
      d.upload(base + codes, v.scales, static_cast<std::size_t>(n / block) * sizeof(float));
      return View{v.storage, base, reinterpret_cast<float*>(base + codes)};
    };
    DecodeSumArgs args;
    for (int k = 0; k < count; ++k) {
      const View part = place(parts[k], k * part_bytes);
      const View rest = residuals == nullptr ? View{} : place(residuals[k], k * part_bytes + half);
      if (k == 0) args.in.part = part, args.in.residual = rest;
    }
    Copy sum(d, nullptr, 0, whole(n, block) * sizeof(float));
    Amax amax(d);
    args.in.count = count;
    args.in.part_bytes = part_bytes;
    args.factor = factor;
    args.out = static_cast<float*>(sum.data());
    args.elements = n;
    args.block = block;
    args.amax = amax.pointer();
    d.decode_sum(args);
    d.download(out, sum.data(), static_cast<std::size_t>(n) * sizeof(float));
    return amax.value();
  }

  // Block by block: the device has exact sums only.
  static std::uint32_t sum_squares(View x, View residual, float factor, double* out, std::int64_t n,
                                   int block) {
    Device& d = device(kDevice);
    ViewCopy values(d, x, n, block), rest(d, residual, n, block);
    std::uint32_t largest = 0;
    for (std::int64_t at = 0; at < n; at += block) {
      Copy limbs(d, nullptr, 0, ExactLimbs::kWords * sizeof(std::int64_t));
      Amax amax(d);
      d.sum_squares({.x = values.view().at(at, block),
                     .residual = residual ? rest.view().at(at, block) : View{},
                     .factor = factor,
                     .elements = block,
                     .block = block,
                     .limbs = static_cast<std::int64_t*>(limbs.data()),
                     .amax = amax.pointer()});
      std::int64_t words[ExactLimbs::kWords];
      d.download(words, limbs.data(), sizeof words);
      largest = std::max(largest, amax.value());
      const std::uint32_t bits = amax.value();
      out[at / block] = bits > kNotFiniteBits    ? NAN
                        : bits == kNotFiniteBits ? INFINITY
                                                 : ExactSum(words).value();
    }
    return largest;
  }

  static std::uint32_t adam(const AdamArgs& host) {
    Device& d = device(kDevice);
    const auto n = static_cast<std::size_t>(host.elements);
    AdamLaunch launch{.args = host, .weight_elements = host.elements, .amax = nullptr};
    ViewCopy grad(d, host.grad, host.elements, host.block);
    ViewCopy rest(d, host.grad_residual, host.elements, host.block);
    ViewCopy m(d, host.exp_avg, host.elements, host.block);
    ViewCopy v(d, host.exp_avg_sq, host.elements, host.block);
    Copy weight(d, host.weight, n * static_cast<std::size_t>(bytes_of(host.weight_dtype)));
    Copy master(d, host.master, n * static_cast<std::size_t>(host.master_bits) / 8);
    Amax amax(d);
    launch.args.grad = grad.view();
    launch.args.grad_residual = rest.view();
    launch.args.exp_avg = m.view();
    launch.args.exp_avg_sq = v.view();
    launch.args.weight = weight.data();
    launch.args.master = master.data();
    launch.amax = amax.pointer();
    d.adam(launch);
    m.download();
    v.download();
    weight.download(host.weight);
    master.download(host.master);
    return amax.value();
  }

  static void split_master(const float* values, DType dtype, void* weight, int master_bits,
                           void* rest, std::int64_t n) {
    Device& d = device(kDevice);
    const auto count = static_cast<std::size_t>(n);
    Copy p(d, values, count * sizeof(float));
    Copy w(d, weight, count * static_cast<std::size_t>(bytes_of(dtype)));
    Copy r(d, rest, count * static_cast<std::size_t>(master_bits) / 8);
    d.split_master({.dtype = dtype,
                    .weight = w.data(),
                    .master_bits = master_bits,
                    .rest = r.data(),
                    .values = static_cast<float*>(p.data()),
                    .elements = n});
    w.download(weight);
    r.download(rest);
  }
  static void join_master(DType dtype, const void* weight, int master_bits, const void* rest,
                          float* out, std::int64_t n) {
    Device& d = device(kDevice);
    const auto count = static_cast<std::size_t>(n);
    Copy w(d, weight, count * static_cast<std::size_t>(bytes_of(dtype)));
    Copy r(d, rest, count * static_cast<std::size_t>(master_bits) / 8);
    Copy p(d, nullptr, 0, count * sizeof(float));
    d.join_master({.dtype = dtype,
                   .weight = w.data(),
                   .master_bits = master_bits,
                   .rest = r.data(),
                   .values = static_cast<float*>(p.data()),
                   .elements = n});
    d.download(out, p.data(), count * sizeof(float));
  }

  static Ops ops(std::string_view name) {
    return {name,        encode, decode,       accumulate, decode_sum,
            sum_squares, adam,   split_master, join_master};
  }
};

const std::vector<Ops>& device_tables() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> list;
    for (const auto& d : devices()) list.push_back(d->name().substr(0, d->name().find(':')));
    return list;
  }();
  static const std::vector<Ops> tables = [] {
    constexpr Ops (*kMakers[kMaxDevices])(std::string_view) = {Table<0>::ops, Table<1>::ops,
                                                               Table<2>::ops, Table<3>::ops};
    std::vector<Ops> list;
    for (std::size_t i = 0; i < names.size(); ++i) list.push_back(kMakers[i](names[i]));
    return list;
  }();
  return tables;
}

}  // namespace

std::vector<const Ops*> all_ops() {
  std::vector<const Ops*> all = runnable_cpu_ops();
  for (const Ops& ops : device_tables()) all.push_back(&ops);
  return all;
}

const Ops& ops_under_test() {
  const char* wanted = std::getenv("ZEROFP8_TEST_OPS");
  if (wanted == nullptr || *wanted == '\0') return cpu_ops();
  std::string allowed;
  for (const Ops* ops : all_ops()) {
    if (ops->name == wanted) return *ops;
    allowed += " " + std::string(ops->name);
  }
  throw std::runtime_error("ZEROFP8_TEST_OPS: given " + std::string(wanted) + "; here:" + allowed);
}

}  // namespace zerofp8::test

#include "src/comm/envelope.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

namespace zerofp8 {

std::string_view to_string(Collective kind) {
  switch (kind) {
    case Collective::kAllToAll:
      return "all_to_all";
    case Collective::kAllGather:
      return "all_gather";
    case Collective::kBroadcast:
      return "broadcast";
    case Collective::kAllReduce:
      return "all_reduce";
    case Collective::kGatherControl:
      return "gather_control";
    case Collective::kBarrier:
      return "barrier";
  }
  return "unknown collective";
}

void Envelope::set_text(std::string_view value) {
  text.fill('\0');
  const std::size_t room = text.size() - 1;
  std::memcpy(text.data(), value.data(), std::min(value.size(), room));
  if (value.size() > room) std::memcpy(text.data() + room - 3, "...", 3);
}

std::string_view Envelope::get_text() const {
  return {text.data(), strnlen(text.data(), text.size())};
}

void Envelope::set_absent(std::span<const int> ranks) {
  absent_count = static_cast<std::int32_t>(std::min<std::size_t>(ranks.size(), kMaxAbsent));
  std::copy_n(ranks.begin(), absent_count, absent.begin());
}

std::vector<int> Envelope::get_absent() const {
  return {absent.begin(), absent.begin() + std::clamp(absent_count, 0, kMaxAbsent)};
}

bool agree(const Envelope& mine, const Envelope& theirs) {
  return mine.magic == theirs.magic && mine.call == theirs.call &&
         mine.collective == theirs.collective && mine.root == theirs.root &&
         mine.dtype == theirs.dtype && mine.send_bytes == theirs.recv_bytes &&
         mine.recv_bytes == theirs.send_bytes && mine.chunk_bytes == theirs.chunk_bytes &&
         mine.get_text() == theirs.get_text();
}

std::string describe(const Envelope& hello) {
  if (hello.magic != Envelope::kMagic) return "a call of another version of zerofp8";
  std::string text = fmt::format("call {}: {} '{}'", hello.call + 1, to_string(hello.collective),
                                 hello.get_text());
  if (hello.collective == Collective::kBroadcast) text += fmt::format(" from rank {}", hello.root);
  if (static_cast<int>(hello.dtype) < kDTypeCount) {
    text += fmt::format(" of {}", to_string(hello.dtype));
  }
  text += fmt::format(", sending {} bytes and expecting {}", hello.send_bytes, hello.recv_bytes);
  if (hello.chunk_bytes != 0) text += fmt::format(" in messages of up to {}", hello.chunk_bytes);
  return text;
}

}  // namespace zerofp8

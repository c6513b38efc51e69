#include "src/optim/file_io.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <vector>

#include "zerofp8/error.h"

namespace zerofp8 {
namespace {

[[noreturn]] void fail(const std::string& path, const std::string& action) {
  throw CheckpointError(path, "cannot " + action + ": " + std::strerror(errno));
}

}  // namespace

struct FileWriter::Hash {
  XXH3_state_t* state = XXH3_createState();
  Hash() { XXH3_64bits_reset(state); }
  ~Hash() { XXH3_freeState(state); }
};

FileWriter::FileWriter(std::string path) : path_(std::move(path)), hash_(std::make_unique<Hash>()) {
  fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd_ < 0) fail(path_, "create the file");
}

FileWriter::~FileWriter() {
  if (fd_ >= 0) ::close(fd_);
}

void FileWriter::write(std::span<const std::byte> data) {
  XXH3_64bits_update(hash_->state, data.data(), data.size());
  bytes_ += static_cast<std::int64_t>(data.size());
  while (!data.empty()) {
    const ssize_t n = ::write(fd_, data.data(), std::min<std::size_t>(data.size(), 1u << 30));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail(path_, "write");
    data = data.subspan(static_cast<std::size_t>(n));
  }
}

FileDigest FileWriter::finish() {
  if (::fsync(fd_) != 0) fail(path_, "sync");
  const int fd = fd_;
  fd_ = -1;
  if (::close(fd) != 0) fail(path_, "close");
  return {bytes_, XXH3_64bits_digest(hash_->state)};
}

FileReader::FileReader(std::string path) : path_(std::move(path)) {
  fd_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd_ < 0) fail(path_, "open");
  struct stat info {};
  if (::fstat(fd_, &info) != 0) fail(path_, "stat");
  size_ = info.st_size;
}

FileReader::~FileReader() {
  if (fd_ >= 0) ::close(fd_);
}

void FileReader::read(std::int64_t offset, std::span<std::byte> out) const {
  while (!out.empty()) {
    const ssize_t n = ::pread(fd_, out.data(), std::min<std::size_t>(out.size(), 1u << 30), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(path_, "read");
    if (n == 0) {
      throw CheckpointError(path_, "is truncated: it ends at byte " + std::to_string(size_));
    }
    offset += n;
    out = out.subspan(static_cast<std::size_t>(n));
  }
}

FileDigest digest_of(const std::string& path) {
  const FileReader reader(path);
  XXH3_state_t* state = XXH3_createState();
  XXH3_64bits_reset(state);
  std::vector<std::byte> piece(1u << 20);
  for (std::int64_t at = 0; at < reader.size();) {
    const auto n =
        std::min<std::int64_t>(static_cast<std::int64_t>(piece.size()), reader.size() - at);
    const std::span<std::byte> out(piece.data(), static_cast<std::size_t>(n));
    reader.read(at, out);
    XXH3_64bits_update(state, out.data(), out.size());
    at += n;
  }
  const FileDigest digest{reader.size(), XXH3_64bits_digest(state)};
  XXH3_freeState(state);
  return digest;
}

std::uint64_t hash_of(const std::string& text) { return XXH3_64bits(text.data(), text.size()); }

std::string read_text(const std::string& path) {
  const FileReader reader(path);
  std::string text(static_cast<std::size_t>(reader.size()), '\0');
  reader.read(0, std::as_writable_bytes(std::span(text)));
  return text;
}

FileDigest write_text_atomically(const std::string& path, const std::string& text) {
  const std::string temporary = path + ".tmp";
  FileWriter writer(temporary);
  writer.write(std::as_bytes(std::span(text)));
  const FileDigest digest = writer.finish();
  if (std::rename(temporary.c_str(), path.c_str()) != 0) fail(path, "rename into place");
  sync_folder(std::filesystem::path(path).parent_path());
  return digest;
}

void sync_folder(const std::string& path) {
  const int fd = ::open(path.empty() ? "." : path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) fail(path, "open the folder");
  const int result = ::fsync(fd);
  ::close(fd);
  if (result != 0) fail(path, "sync the folder");
}

}  // namespace zerofp8

// Durable files: written to the end and synced, or an error that names the file and the cause.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace zerofp8 {

// Size in bytes and XXH3 (64 bits, xxHash specification by Y. Collet) of a whole file.
struct FileDigest {
  std::int64_t bytes = 0;
  std::uint64_t hash = 0;
  bool operator==(const FileDigest&) const = default;
};

// Writes a new file in order, hashing on the way. Throws CheckpointError.
class FileWriter {
 public:
  explicit FileWriter(std::string path);
  ~FileWriter();
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;
  void write(std::span<const std::byte> data);
  // fsync and close.
  FileDigest finish();

 private:
  struct Hash;
  std::string path_;
  int fd_ = -1;
  std::int64_t bytes_ = 0;
  std::unique_ptr<Hash> hash_;
};

// Reads anywhere in an existing file. Throws CheckpointError; a read beyond the end is "truncated".
class FileReader {
 public:
  explicit FileReader(std::string path);
  ~FileReader();
  FileReader(const FileReader&) = delete;
  FileReader& operator=(const FileReader&) = delete;
  std::int64_t size() const { return size_; }
  const std::string& path() const { return path_; }
  void read(std::int64_t offset, std::span<std::byte> out) const;

 private:
  std::string path_;
  int fd_ = -1;
  std::int64_t size_ = 0;
};

FileDigest digest_of(const std::string& path);
std::uint64_t hash_of(const std::string& text);
std::string read_text(const std::string& path);
// Writes `path` + ".tmp", syncs, renames over `path`, syncs the folder: readers see old or new,
// never half.
FileDigest write_text_atomically(const std::string& path, const std::string& text);
void sync_folder(const std::string& path);

}  // namespace zerofp8

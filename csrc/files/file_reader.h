// Reading of files whose contents have checksums, straight to where they belong.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tilework {

/// The bytes of a part of a file that are wanted, and their places: runs of `run` bytes. They are the
/// elements of an array with gaps, in ascending order in the file: counts[d] of them, from[d] bytes
/// apart in the file and to[d] in memory, the last d fastest.
struct Runs {
  char* target;  // of the first run; null if nothing is wanted
  size_t first;  // where it begins in the part
  size_t run;
  std::vector<size_t> counts, from;
  std::vector<int64_t> to;

  /// The end of the last run, in the part.
  size_t end() const;
};

/// A part of a file, cut into chunks that have a checksum each.
struct ChunkedPart {
  uint64_t offset;  // in the file
  size_t bytes, chunk;
  const uint32_t* checksums = nullptr;
  const char* checked = nullptr;  // for each chunk: true if this call compares its checksum
  /// For each chunk: what the share of the wanted bytes in its checksum is added to (exclusive or).
  /// Not null: nothing is compared, and nothing is read that is not wanted.
  uint32_t* shares = nullptr;

  bool compares(size_t at) const { return shares == nullptr && checked[at / chunk]; }
};

/// What is wanted of a part between `begin` and `end`, multiples of a chunk or the part's end.
struct PartRead {
  int fd;
  ChunkedPart part;
  Runs runs;
  size_t begin, end;
};

struct ReadOutcome {
  enum Kind { kRead, kDamaged, kTruncated, kFailed } kind = kRead;
  size_t chunk = 0;
  uint32_t found = 0;  // its checksum
  int error = 0;       // the system's number, where it cannot read
  size_t read = 0;     // of several
};

/// Reads parts of files, each byte but once where it can be: checksums are computed of what is in a
/// cache. Where the system has a block of a file in one large page, that is mapped: it costs nothing,
/// nor does the copy that read() makes. What is not in memory yet is fetched in such pages, where the
/// file system has them. Small pages cost more to map than to copy: they are read().
///
/// Mapped pages may vanish: a file is cut, or a disk fails. The signal of that is caught; then read()
/// tells what is wrong. Memory is given back at the end of each call.
class FileReader {
 public:
  FileReader();
  ~FileReader();
  FileReader(const FileReader&) = delete;
  FileReader& operator=(const FileReader&) = delete;

  /// Read one after the other, up to the first that cannot be. Cheapest in the order of the files.
  ReadOutcome read(const std::vector<PartRead>& reads);

 private:
  struct Window;
  struct Walk;

  ReadOutcome read_part(const PartRead& read);
  const char* large_page(int fd, uint64_t offset, size_t bytes);
  void unmap();
  bool read_mapped(const char* source, const Window& window, Walk& walk);
  bool read_runs(int fd, const ChunkedPart& part, size_t end, Walk& walk);
  void read_window(int fd, const Window& window, Walk& walk);
  char* bounce();

  char* address_space_;
  /// What of which file is mapped.
  int mapped_fd_ = -1;
  uint64_t mapped_from_ = 0;
  size_t mapped_bytes_ = 0;
  /// Blocks to read without looking, and how many that will be after the next that is no large page.
  int to_pass_ = 0, penalty_ = 0;
  char* bounce_ = nullptr;
};

/// Have the system begin to bring bytes of a file to the disk; hints may fail. The flush tells errors.
void start_writeback(int fd, int64_t offset, int64_t bytes);

}  // namespace tilework

#include "files/file_reader.h"

#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <mutex>
#include <system_error>

#include "files/crc32.h"
#include "transport/copy.h"

#ifndef RWF_NOWAIT
#define RWF_NOWAIT 8
#endif

namespace tilework {
namespace {

/// The bytes to map at once.
constexpr size_t kMapped = 8 << 20;
/// The size and alignment of a file's block that may be one large page.
constexpr size_t kLargePage = 2 << 20;
/// The least bytes of a block that are worth mapping.
constexpr size_t kLeastMapped = 256 << 10;
/// The most blocks to read without a check, after blocks that were not large pages.
constexpr int kMostPassed = 31;
/// The bytes to read at once: small enough to stay in the cache for the checksum and the copy.
constexpr size_t kPiece = 256 << 10;
/// Runs at this distance are read separately, if the bytes between them are not needed.
constexpr size_t kReadApart = 12 << 10;
/// Runs of fewer bytes are copied through the cache.
constexpr size_t kStreamedRun = 512;

// -- pages that vanish -----------------------------------------------------------------------

thread_local sigjmp_buf* escape = nullptr;
struct sigaction others_action;

/// Leave guarded(), or act as the previous handler.
void on_bus_error(int number, siginfo_t* info, void* context) {
  if (escape != nullptr) siglongjmp(*escape, 1);
  if (others_action.sa_flags & SA_SIGINFO) return others_action.sa_sigaction(number, info, context);
  if (others_action.sa_handler != SIG_DFL && others_action.sa_handler != SIG_IGN)
    return others_action.sa_handler(number);
  signal(number, SIG_DFL);  // the signal is raised again
}

void catch_bus_errors() {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  struct sigaction present;
  sigaction(SIGBUS, nullptr, &present);
  if ((present.sa_flags & SA_SIGINFO) && present.sa_sigaction == on_bus_error) return;
  others_action = present;
  struct sigaction ours = {};
  ours.sa_sigaction = on_bus_error;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGBUS, &ours, nullptr);
}

/// Run a function that reads mapped pages and owns nothing; false if a page is missing.
template <typename Function>
bool guarded(Function&& function) {
  sigjmp_buf here;
  if (sigsetjmp(here, 1) != 0) {
    escape = nullptr;
    return false;
  }
  escape = &here;
  std::atomic_signal_fence(std::memory_order_seq_cst);  // the handler reads it
  function();
  std::atomic_signal_fence(std::memory_order_seq_cst);
  escape = nullptr;
  return true;
}

/// The number of this thread's page faults; a large page counts once.
long page_faults() {
  rusage usage;
  getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_minflt + usage.ru_majflt;
}

bool is_cached(int fd, uint64_t offset) {
  char byte;
  iovec memory = {&byte, 1};
  return preadv2(fd, &memory, 1, static_cast<off_t>(offset), RWF_NOWAIT) >= 0 || errno != EAGAIN;
}

/// The number of bytes read: fewer than asked for where the file ends.
size_t read_at(int fd, char* to, size_t bytes, uint64_t offset) {
  size_t done = 0;
  while (done < bytes) {
    const ssize_t count = pread(fd, to + done, bytes - done, static_cast<off_t>(offset + done));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw std::system_error(errno, std::generic_category());
    if (count == 0) break;
    done += static_cast<size_t>(count);
  }
  return done;
}

}  // namespace

size_t Runs::end() const {
  size_t last = first;
  for (size_t d = 0; d < counts.size(); ++d) last += (counts[d] - 1) * from[d];
  return last + run;
}

/// A range of a part that lies in one block.
struct FileReader::Window {
  const ChunkedPart& part;
  size_t begin, end;
};

/// The way through a part: the next wanted byte, and the checksum of the chunk so far.
struct FileReader::Walk {
  Walk(const Runs& all, size_t begin, bool collecting)
      : runs(all), index(all.counts.size()), passed(begin), collects(collecting) {
    if (runs.target == nullptr) return;
    at = runs.first, to = runs.target;
    size_t left = begin > at ? begin - at : 0;
    for (size_t d = 0; d < index.size(); ++d) {
      index[d] = runs.from[d] ? std::min(left / runs.from[d], runs.counts[d] - 1) : 0;
      left -= index[d] * runs.from[d];
      at += index[d] * runs.from[d];
      to += static_cast<int64_t>(index[d]) * runs.to[d];
    }
    if (left >= runs.run)
      advance();
    else
      done = left;
  }

  bool over() const { return to == nullptr; }
  /// The next wanted byte of the part, and the end of its run.
  size_t next() const { return at + done; }
  size_t run_end() const { return at + runs.run; }

  /// Move past `bytes` bytes of the run.
  void take(size_t bytes) {
    done += bytes;
    passed = next();
    if (done == runs.run) advance();
  }

  void advance() {
    done = 0;
    for (size_t d = index.size(); d-- > 0;) {
      if (++index[d] < runs.counts[d]) {
        at += runs.from[d];
        to += runs.to[d];
        return;
      }
      index[d] = 0;
      at -= (runs.counts[d] - 1) * runs.from[d];
      to -= static_cast<int64_t>(runs.counts[d] - 1) * runs.to[d];
    }
    to = nullptr;
  }

  /// Copy the wanted bytes of [begin, end) of the part, which lies at `source`.
  void copy_from(const char* source, size_t begin, size_t end) {
    const size_t apart = index.empty() ? 0 : runs.from.back();
    while (!over() && next() < end) {
      const size_t bytes = std::min(end, run_end()) - next();
      const char* from = source + (next() - begin);
      const size_t count = collects && apart > 0 ? whole_runs(end) : 0;
      if (count > 1) {
        share_until_next().copy_runs(to, runs.to.back(), from, apart, runs.run, count);
        index.back() += count - 1, at += (count - 1) * apart;
        to += static_cast<int64_t>(count - 1) * runs.to.back();
        take(runs.run);
        continue;
      }
      if (collects)
        share_until_next().copy(to + done, from, bytes, bytes > kPiece / 4 ? 0 : apart);
      else if (bytes < kStreamedRun)
        copy(to + done, from, bytes);
      else
        copy_run(to + done, from, bytes, apart);
      take(bytes);
    }
  }

  /// The runs that follow each other at the same distance, and end before `end`.
  size_t whole_runs(size_t end) const {
    if (done > 0 || run_end() > end) return 0;
    return std::min(runs.counts.back() - index.back(), (end - run_end()) / runs.from.back() + 1);
  }

  /// The checksum's share, moved past bytes of other shares to the next wanted byte.
  Crc32Share& share_until_next() {
    share.skip(next() - passed);
    return share;
  }

  /// Processors do not predict the begin of the next run, so this fetches blocks of the next run during
  /// the copy.
  static void copy_run(char* to, const char* from, size_t bytes, size_t apart) {
    if (apart == 0 || bytes > kPiece / 4) return copy_past_caches(to, from, bytes);
    constexpr size_t kLine = 64;
    for (size_t at = 0; at < bytes;) {
      const size_t ahead = reinterpret_cast<uintptr_t>(to + at) % kLine;
      const size_t block = std::min(bytes - at, kStreamedRun - ahead);
      for (size_t line = 0; line < block; line += kLine)
        __builtin_prefetch(from + apart + at + line, 0, 2);
      copy_past_caches(to + at, from + at, block);
      at += block;
    }
  }

  const Runs& runs;
  std::vector<size_t> index;
  size_t at = 0, done = 0;
  char* to = nullptr;
  uint32_t crc = 0;
  Crc32Share share;
  size_t passed;  // by the share
  bool collects = false;
  ReadOutcome outcome;

  /// The end of the piece that begins at `begin`: in the same chunk, at the next end of a long run.
  size_t piece_end(const ChunkedPart& part, size_t begin, size_t end) const {
    end = std::min({end, begin + kPiece, (begin / part.chunk + 1) * part.chunk});
    if (over() || runs.run < kPiece / 4) return end;
    if (next() > begin) return std::min(end, next());
    return std::min(end, run_end());
  }

  bool is_wanted(size_t begin, size_t end) const {
    return !over() && next() == begin && run_end() >= end;
  }

  /// True if it is better not to read bytes between runs. From a disk everything is read, so that the
  /// system reads ahead, in large pages.
  bool reads_runs(bool cached) const {
    const size_t apart = index.empty() ? runs.run : runs.from.back();
    return runs.run >= kPiece / 4 || (cached && apart >= kReadApart);
  }

  /// Compare a chunk that ends here; false if it is damaged.
  bool close_chunk(const ChunkedPart& part, size_t end) {
    if (end % part.chunk != 0 && end != part.bytes) return true;
    const size_t chunk = (end - 1) / part.chunk;
    if (collects) {
      share.skip(end - passed);
      part.shares[chunk] ^= share.value();
      share.restart(), passed = end;
      return true;
    }
    if (part.checked[chunk] && crc != part.checksums[chunk]) {
      outcome = {ReadOutcome::kDamaged, chunk, crc};
      return false;
    }
    crc = 0;
    return true;
  }
};

FileReader::FileReader() {
  void* reserved = mmap(nullptr, kMapped + kLargePage, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  address_space_ = reserved == MAP_FAILED ? nullptr : static_cast<char*>(reserved);
  catch_bus_errors();
}

FileReader::~FileReader() {
  if (address_space_ != nullptr) munmap(address_space_, kMapped + kLargePage);
  std::free(bounce_);
}

char* FileReader::bounce() {
  if (bounce_ == nullptr) bounce_ = static_cast<char*>(std::aligned_alloc(4096, kPiece));
  if (bounce_ == nullptr) throw std::bad_alloc();
  return bounce_;
}

/// The file's bytes from an offset on, all in one block; null unless they are in one large page.
const char* FileReader::large_page(int fd, uint64_t offset, size_t bytes) {
  if (address_space_ == nullptr || bytes < kLeastMapped) return nullptr;
  if (to_pass_ > 0) return --to_pass_, nullptr;
  char* aligned = address_space_ + -reinterpret_cast<uintptr_t>(address_space_) % kLargePage;
  const bool is_mapped =
      fd == mapped_fd_ && offset >= mapped_from_ && offset - mapped_from_ < mapped_bytes_;
  if (!is_mapped) {
    mapped_fd_ = fd, mapped_from_ = offset / kLargePage * kLargePage, mapped_bytes_ = 0;
    if (mmap(aligned, kMapped, PROT_READ, MAP_SHARED | MAP_FIXED, fd,
             static_cast<off_t>(mapped_from_)) == MAP_FAILED)
      return nullptr;
    mapped_bytes_ = kMapped;
    madvise(aligned, kMapped, MADV_HUGEPAGE);  // missing pages come as large pages
  }
  const char* place = aligned + (offset - mapped_from_);
  const volatile char* touched = place;
  const long before = page_faults();
  const bool there = guarded([&] { (void)touched[0], (void)touched[bytes - 1]; });
  if (there && page_faults() - before <= 1) {
    penalty_ = 0;
    return place;
  }
  to_pass_ = penalty_;
  penalty_ = std::min(2 * penalty_ + 1, kMostPassed);
  return nullptr;
}

void FileReader::unmap() {
  if (mapped_bytes_ == 0) return;
  mmap(address_space_, kMapped + kLargePage, PROT_NONE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  mapped_bytes_ = 0;
}

/// False if some pages could not be read; `walk` is then undefined.
bool FileReader::read_mapped(const char* source, const Window& window, Walk& walk) {
  const ChunkedPart& part = window.part;
  const bool read = guarded([&] {
    for (size_t at = window.begin; at < window.end;) {
      const size_t end = walk.piece_end(part, at, window.end), bytes = end - at;
      const char* piece = source + (at - window.begin);
      const bool checked = part.compares(at);
      if (walk.is_wanted(at, end) && checked) {
        walk.crc = copy_crc32(walk.to + walk.done, piece, bytes, walk.crc);
        walk.take(bytes);
      } else {
        if (checked) walk.crc = crc32(piece, bytes, walk.crc);
        walk.copy_from(piece, at, end);
      }
      if (!walk.close_chunk(part, end)) break;
      at = end;
    }
  });
  fence_streamed_copies();
  return read;
}

/// Read the wanted bytes before `end`, run by run, directly into place; false if the file ends.
bool FileReader::read_runs(int fd, const ChunkedPart& part, size_t end, Walk& walk) {
  while (!walk.over() && walk.next() < end) {
    const size_t bytes = std::min(end, walk.run_end()) - walk.next();
    char* to = walk.to + walk.done;
    if (read_at(fd, to, bytes, part.offset + walk.next()) < bytes) return false;
    if (walk.collects) walk.share_until_next().add(to, bytes);
    walk.take(bytes);
  }
  return true;
}

void FileReader::read_window(int fd, const Window& window, Walk& walk) {
  const ChunkedPart& part = window.part;
  const bool cached = is_cached(fd, part.offset + window.begin);
  for (size_t at = window.begin; at < window.end;) {
    const size_t end = walk.piece_end(part, at, window.end);
    const bool checked = part.compares(at), in_place = walk.is_wanted(at, end);
    if (!checked && walk.reads_runs(cached)) {
      if (!read_runs(fd, part, end, walk)) {
        walk.outcome = {ReadOutcome::kTruncated, at / part.chunk, 0};
        return;
      }
      walk.close_chunk(part, end);
      at = end;
      continue;
    }
    // Without a checksum, read only wanted bytes.
    const size_t begin = checked || walk.over() ? at : std::min(std::max(at, walk.next()), end);
    if (checked || (!walk.over() && begin < end)) {
      char* to = in_place ? walk.to + walk.done : bounce();
      const size_t bytes = end - begin;
      if (read_at(fd, to, bytes, part.offset + begin) < bytes) {
        walk.outcome = {ReadOutcome::kTruncated, at / part.chunk, 0};
        return;
      }
      if (checked) walk.crc = crc32(to, bytes, walk.crc);
      if (in_place && walk.collects) walk.share_until_next().add(to, bytes);
      in_place ? walk.take(bytes) : walk.copy_from(to, begin, end);
    }
    if (!walk.close_chunk(part, end)) return;
    at = end;
  }
  fence_streamed_copies();
}

ReadOutcome FileReader::read(const std::vector<PartRead>& reads) {
  struct Unmapping {
    FileReader& reader;
    ~Unmapping() { reader.unmap(); }
  } unmapping{*this};
  for (size_t number = 0; number < reads.size(); ++number) {
    ReadOutcome outcome;
    try {
      outcome = read_part(reads[number]);
    } catch (const std::system_error& error) {
      outcome = {ReadOutcome::kFailed, 0, 0, error.code().value()};
    }
    outcome.read = number;
    if (outcome.kind != ReadOutcome::kRead) return outcome;
  }
  return {};
}

ReadOutcome FileReader::read_part(const PartRead& read) {
  const ChunkedPart& part = read.part;
  const int fd = read.fd;
  size_t begin = read.begin;
  const size_t end = read.end;
  Walk walk(read.runs, begin, part.shares != nullptr);
  while (begin < end && walk.outcome.kind == ReadOutcome::kRead) {
    // Skip bytes that are neither checked nor wanted.
    if (!part.compares(begin) && (walk.over() || walk.next() > begin)) {
      const size_t chunk_end = std::min((begin / part.chunk + 1) * part.chunk, end);
      if (walk.over() || walk.next() >= chunk_end) {
        if (walk.collects) walk.close_chunk(part, chunk_end);
        begin = chunk_end;
        continue;
      }
    }
    const uint64_t offset = part.offset + begin;
    const size_t bytes =
        std::min(end - begin, kLargePage - static_cast<size_t>(offset % kLargePage));
    const Window window = {part, begin, begin + bytes};
    const Walk before = walk;
    const char* source = large_page(fd, offset, bytes);
    if (source == nullptr || !read_mapped(source, window, walk)) {
      walk.index = before.index;
      walk.at = before.at, walk.done = before.done, walk.to = before.to, walk.crc = before.crc;
      walk.share = before.share, walk.passed = before.passed;
      walk.outcome = before.outcome;
      read_window(fd, window, walk);
    }
    begin += bytes;
  }
  return walk.outcome;
}

void start_writeback(int fd, int64_t offset, int64_t bytes) {
#if defined(SYNC_FILE_RANGE_WRITE)
  (void)sync_file_range(fd, offset, bytes, SYNC_FILE_RANGE_WRITE);
#else
  (void)fd, (void)offset, (void)bytes;
#endif
}

}  // namespace tilework

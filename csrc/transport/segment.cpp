#include "transport/segment.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <system_error>

namespace tilework {
namespace {

constexpr uint64_t kMagic = 0x006b726f77656c69;  // "ilework" in memory
constexpr size_t kMaxArena = size_t{1} << 40;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

[[noreturn]] void fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

int duplicate(int fd) {
  const int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (copy < 0) fail("dup of the segment");
  return copy;
}

/// Bytes of a channel's ring: those to one rank have together what its two outboxes have, twice, so that in a
/// small group a sender writes where its receiver has read long ago (see Cell in exchange.h).
size_t affordable_ring(size_t size, size_t slot_bytes) {
  size_t bytes = kLeastRingBytes;
  while (2 * bytes <= 4 * slot_bytes / size) bytes *= 2;
  return bytes;
}

/// Bytes of one arena: a share of the machine's memory, so that all arenas together hold no more.
size_t affordable_arena(int size) {
  const size_t memory = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  const size_t share = std::min(memory / size, kMaxArena) / kPage * kPage;
  rlimit files{};  // a longer file would be refused, with a signal
  const bool refused = getrlimit(RLIMIT_FSIZE, &files) == 0 && files.rlim_cur < 2 * memory;
  return refused ? 0 : share;
}

void check_nonce(const std::string& nonce) {
  if (nonce.size() > kMaxNonce)
    throw std::invalid_argument("nonce: " + std::to_string(nonce.size()) +
                                " bytes given, at most " + std::to_string(kMaxNonce) +
                                " are allowed");
}

/// Tunables as they can be used: the header may hold garbage.
Tunables checked_tunables(int fd, const SegmentLayout& layout) {
  Identity identity{};
  if (pread(fd, &identity, sizeof identity, 0) != static_cast<ssize_t>(sizeof identity)) return {};
  Tunables tunables = identity.tunables;
  const uint64_t least = round_up(static_cast<size_t>(layout.size) * kLine, kPage);
  for (uint64_t* chunk : {&tunables.chunk_bytes, &tunables.reduce_chunk_bytes})
    *chunk = std::min<uint64_t>(layout.slot_bytes, std::max(*chunk / kLine * kLine, least));
  return tunables;
}

uint64_t file_number(int fd) {
  struct stat status;
  return fstat(fd, &status) == 0 ? status.st_ino : 0;
}

SegmentLayout checked_layout(int fd, int size, const std::string& nonce) {
  check_nonce(nonce);
  int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals)
    throw std::invalid_argument("not a tilework segment: not a sealed memfd");
  Identity identity;  // read by value: whoever can write the file is not trusted
  if (pread(fd, &identity, sizeof identity, 0) != static_cast<ssize_t>(sizeof identity))
    throw std::invalid_argument("not a tilework segment: too short");
  if (identity.magic != kMagic) throw std::invalid_argument("not a tilework segment: wrong magic");
  if (identity.abi != kAbi)
    throw std::invalid_argument("the segment has ABI " + std::to_string(identity.abi) +
                                ", this build has " + std::to_string(kAbi) +
                                ": all ranks must run the same tilework");
  if (identity.size != static_cast<uint32_t>(size))
    throw std::invalid_argument("the segment is for " + std::to_string(identity.size) +
                                " ranks, not " + std::to_string(size));
  if (identity.nonce_bytes != nonce.size() ||
      memcmp(identity.nonce, nonce.data(), nonce.size()) != 0)
    throw std::invalid_argument("the segment belongs to another group (its nonce differs)");
  SegmentLayout layout(size, identity.slot_bytes, identity.arena_bytes);
  struct stat status;
  if (fstat(fd, &status) != 0 || static_cast<size_t>(status.st_size) != layout.total)
    throw std::invalid_argument("not a tilework segment: wrong length");
  return layout;
}

}  // namespace

File::~File() {
  if (fd >= 0) close(fd);
}

SegmentLayout::SegmentLayout(int size_, size_t slot_bytes_, size_t arena_bytes_)
    : size(size_),
      slot_bytes(slot_bytes_),
      arena_bytes(arena_bytes_),
      ring_bytes(affordable_ring(std::max(size_, 1), slot_bytes_)) {
  if (size < 1 || size > kMaxRanks)
    throw std::invalid_argument("size: " + std::to_string(size) + " given, 1 to " +
                                std::to_string(kMaxRanks) + " ranks are possible");
  size_t least = round_up(size * kLine, kPage);
  if (slot_bytes < least || slot_bytes % kPage != 0 || slot_bytes > (size_t{1} << 30))
    throw std::invalid_argument("slot_bytes: " + std::to_string(slot_bytes) +
                                " given, a multiple of 4096 from " + std::to_string(least) +
                                " to 2**30 is needed");
  if (arena_bytes % kPage != 0 || arena_bytes > kMaxArena)
    throw std::invalid_argument("arena_bytes: " + std::to_string(arena_bytes) +
                                " given, a multiple of 4096 up to 2**40 is needed");
  const size_t n = size;
  tables = sizeof(GroupHeader) + n * sizeof(RankControl);
  cursors = round_up(tables + n * 2 * 2 * n * sizeof(int64_t), kPage);
  outboxes = round_up(cursors + n * n * sizeof(Cursor), kPage);
  channels = outboxes + n * 2 * slot_bytes;
  arenas = channels + n * n * ring_bytes;
  total = arenas + n * arena_bytes;
}

int create_segment(int size, size_t slot_bytes, const std::string& nonce,
                   const Tunables& tunables) {
  SegmentLayout(size, slot_bytes, 0);  // refuses what is impossible
  const SegmentLayout layout(size, slot_bytes, affordable_arena(size));
  check_nonce(nonce);
  File file(memfd_create("tilework", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (file.fd < 0) fail("memfd_create");
  if (ftruncate(file.fd, static_cast<off_t>(layout.total)) != 0) fail("ftruncate of the segment");
  Identity identity{};  // the rest of the file is zeroes, a valid start for everything else
  identity.magic = kMagic;
  identity.abi = kAbi;
  identity.size = static_cast<uint32_t>(size);
  identity.slot_bytes = slot_bytes;
  identity.arena_bytes = layout.arena_bytes;
  identity.tunables = tunables;
  identity.nonce_bytes = static_cast<uint32_t>(nonce.size());
  memcpy(identity.nonce, nonce.data(), nonce.size());
  if (pwrite(file.fd, &identity, sizeof identity, 0) != static_cast<ssize_t>(sizeof identity))
    fail("write of the segment's header");
  if (fcntl(file.fd, F_ADD_SEALS, kSeals) != 0) fail("sealing the segment");
  return file.release();
}

Segment::Segment(int fd, int size, const std::string& nonce, bool of_threads)
    : layout_(checked_layout(fd, size, nonce)),
      tunables_(checked_tunables(fd, layout_)),
      file_(std::make_shared<File>(duplicate(fd))),
      number_(file_number(fd)),
      of_threads_(of_threads),
      mapping_(std::make_shared<Mapping>(file_->fd, 0, layout_.arenas)),
      base_(mapping_->base()),
      arenas_(size) {}

Segment::Segment(const Segment* mate)
    : layout_(mate->layout_),
      tunables_(mate->tunables_),
      file_(mate->file_),
      number_(mate->number_),
      of_threads_(true),
      mapping_(mate->mapping_),
      base_(mate->base_),
      arenas_(mate->size()) {}

std::shared_ptr<Arena> Segment::own_arena(int rank) const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!own_arena_)
    own_arena_ = std::make_shared<Arena>(duplicate(fd()), arena(rank), layout_.arena_bytes);
  has_arena_ = true;
  return own_arena_;
}

uint64_t Segment::own_arena_position(const char* data, size_t bytes) const {
  uint64_t offset;
  if (!has_arena_.load(std::memory_order_acquire)) return 0;
  return own_arena_->locate(data, bytes, offset) ? offset + 1 : 0;
}

void Segment::detach(const char* data, size_t bytes) const {
  if (own_arena_position(data, bytes) != 0) own_arena_->detach(data, bytes);
}

char* Segment::in_arena(int rank, uint64_t offset, size_t bytes) const {
  if (offset > layout_.arena_bytes || bytes > layout_.arena_bytes - offset)
    throw std::out_of_range("beyond the arena");
  std::lock_guard<std::mutex> lock(mutex_);
  auto& mapping = arenas_[rank];
  if (!mapping) mapping = std::make_unique<Mapping>(fd(), arena(rank), layout_.arena_bytes, true);
  return mapping->base() + offset;
}

void Segment::notify_all_ranks() const {
  for (int rank = 0; rank < size(); ++rank) {
    control(rank).round_event.notify_always();
    control(rank).message_event.notify_always();
  }
}

}  // namespace tilework

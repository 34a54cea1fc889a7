// Long data are folded: a register of 128 bits stands for all before it, and carry-less products with
// powers of x modulo the polynomial move it past what follows (V. Gopal et al., "Fast CRC Computation
// for Generic Polynomials Using PCLMULQDQ Instruction", Intel, 2009). The last 16 bytes go by tables.
//
// copy_crc32() stores each register that it has loaded: the products take no time beside a copy that
// waits for memory. Between runs of a share a register is moved past the gap by the same product, with
// another constant.
#include "files/crc32.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "transport/copy.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

namespace tilework {
namespace {

constexpr uint32_t kPolynomial = 0xEDB88320;
constexpr size_t kSlices = 8;

/// Runs to copy, of a multiple of 64 bytes each, to whole lines.
struct RunsToCopy {
  unsigned char* to;
  int64_t to_apart;
  const unsigned char* from;
  size_t apart, run, count;
};

using Tables = std::array<std::array<uint32_t, 256>, kSlices>;

constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? kPolynomial : 0);
    tables[0][byte] = crc;
  }
  for (size_t slice = 1; slice < kSlices; ++slice)
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[slice - 1][byte];
      tables[slice][byte] = (before >> 8) ^ tables[0][before & 255];
    }
  return tables;
}

constexpr Tables kTables = make_tables();

// All of these take and give the state itself, which is the checksum's complement.

uint32_t by_bytes(const unsigned char* data, size_t bytes, uint32_t state) {
  for (; bytes; --bytes) state = (state >> 8) ^ kTables[0][(state ^ *data++) & 255];
  return state;
}

#if defined(__ARM_FEATURE_CRC32)
uint32_t by_words(const unsigned char* data, size_t bytes, uint32_t state) {
  for (; bytes >= 8; data += 8, bytes -= 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    state = __crc32d(state, word);
  }
  return by_bytes(data, bytes, state);
}
#else
uint32_t by_words(const unsigned char* data, size_t bytes, uint32_t state) {
  for (; bytes >= kSlices; data += kSlices, bytes -= kSlices) {
    uint32_t next = 0;
    for (size_t i = 0; i < kSlices; ++i) {
      const uint32_t byte = data[i] ^ (i < 4 ? (state >> (8 * i)) & 255 : 0);
      next ^= kTables[kSlices - 1 - i][byte];
    }
    state = next;
  }
  return by_bytes(data, bytes, state);
}
#endif

#if defined(__x86_64__)

// x^(n + 32) and x^(n - 32) modulo the polynomial, reflected: they move a register by n bits.
constexpr long long kBy128[] = {0x1751997d0, 0x0ccaa009e};
constexpr long long kBy256[] = {0x0f1da05aa, 0x15a546366};
constexpr long long kBy384[] = {0x03db1ecdc, 0x174359406};
constexpr long long kBy512[] = {0x154442bd4, 0x1c6e41596};
constexpr long long kBy2048[] = {0x11542778a, 0x1322d1430};

#define TILEWORK_PCLMUL __attribute__((target("sse4.1,pclmul")))

TILEWORK_PCLMUL inline __m128i load(const unsigned char* data) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
}

TILEWORK_PCLMUL inline __m128i moved(__m128i value, const long long* by) {
  const __m128i k = _mm_set_epi64x(by[1], by[0]);
  return _mm_xor_si128(_mm_clmulepi64_si128(value, k, 0x00), _mm_clmulepi64_si128(value, k, 0x11));
}

/// The state after what `value` stands for and what follows it.
TILEWORK_PCLMUL uint32_t finished(__m128i value, const unsigned char* data, size_t bytes) {
  for (; bytes >= 16; data += 16, bytes -= 16)
    value = _mm_xor_si128(moved(value, kBy128), load(data));
  unsigned char last[16];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(last), value);
  return by_bytes(data, bytes, by_words(last, sizeof(last), 0));
}

/// Load 64 bytes, and store them at `to` unless it is null; it is aligned to a line.
TILEWORK_PCLMUL inline void load_line(const unsigned char* data, unsigned char* to,
                                      __m128i (&line)[4]) {
  for (int i = 0; i < 4; ++i) line[i] = load(data + 16 * i);
  if (to != nullptr)
    for (int i = 0; i < 4; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(to + 16 * i), line[i]);
}

/// Of 64 bytes at least. What is not a whole line is not stored.
template <bool kCopied>
TILEWORK_PCLMUL uint32_t by_pclmul(const unsigned char* data, size_t bytes, uint32_t state,
                                   unsigned char* to, size_t ahead) {
  __m128i lanes[4], line[4];
  load_line(data, kCopied ? to : nullptr, lanes);
  lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128(static_cast<int>(state)));
  for (data += 64, bytes -= 64; bytes >= 64; data += 64, bytes -= 64) {
    if (kCopied) to += 64, __builtin_prefetch(data + ahead);
    load_line(data, kCopied ? to : nullptr, line);
    for (int i = 0; i < 4; ++i) lanes[i] = _mm_xor_si128(moved(lanes[i], kBy512), line[i]);
  }
  for (int i = 1; i < 4; ++i) lanes[i] = _mm_xor_si128(moved(lanes[i - 1], kBy128), lanes[i]);
  return finished(lanes[3], data, bytes);
}

#define TILEWORK_VPCLMUL __attribute__((target("sse4.1,pclmul,avx512f,vpclmulqdq")))

TILEWORK_VPCLMUL inline __m512i load_wide(const unsigned char* data) {
  return _mm512_loadu_si512(data);
}

TILEWORK_VPCLMUL inline __m512i moved_wide(__m512i value, __m512i k, __m512i next) {
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(value, k, 0x00),
                                   _mm512_clmulepi64_epi128(value, k, 0x11), next, 0x96);
}

TILEWORK_VPCLMUL inline __m512i wide_constant(const long long* by) {
  return _mm512_set_epi64(by[1], by[0], by[1], by[0], by[1], by[0], by[1], by[0]);
}

TILEWORK_VPCLMUL inline void store_wide(unsigned char* to, __m512i value) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), value);
}

/// The state after what 64 bytes stand for and what follows them.
TILEWORK_VPCLMUL uint32_t finished_wide(__m512i value, const unsigned char* data, size_t bytes) {
  // By way of memory: g++ 12 warns of its own _mm512_extracti32x4_epi32.
  unsigned char last[64];
  _mm512_storeu_si512(last, value);
  __m128i parts[4];
  for (int i = 0; i < 4; ++i) parts[i] = load(last + 16 * i);
  const __m128i sum = _mm_xor_si128(_mm_xor_si128(moved(parts[0], kBy384), moved(parts[1], kBy256)),
                                    _mm_xor_si128(moved(parts[2], kBy128), parts[3]));
  return finished(sum, data, bytes);
}

/// Of 256 bytes at least. What is not a whole block of 256 bytes is not stored.
template <bool kCopied>
TILEWORK_VPCLMUL uint32_t by_vpclmul(const unsigned char* data, size_t bytes, uint32_t state,
                                     unsigned char* to, size_t ahead) {
  __m512i lanes[4];
  for (int i = 0; i < 4; ++i) {
    lanes[i] = load_wide(data + 64 * i);
    if (kCopied) __builtin_prefetch(data + ahead + 64 * i), store_wide(to + 64 * i, lanes[i]);
  }
  const __m512i start = _mm512_set_epi64(0, 0, 0, 0, 0, 0, 0, static_cast<long long>(state));
  lanes[0] = _mm512_xor_si512(lanes[0], start);
  const __m512i by2048 = wide_constant(kBy2048), by512 = wide_constant(kBy512);
  for (data += 256, bytes -= 256; bytes >= 256; data += 256, bytes -= 256) {
    if (kCopied) to += 256;
    for (int i = 0; i < 4; ++i) {
      const __m512i next = load_wide(data + 64 * i);
      if (kCopied) __builtin_prefetch(data + ahead + 64 * i), store_wide(to + 64 * i, next);
      lanes[i] = moved_wide(lanes[i], by2048, next);
    }
  }
  for (int i = 1; i < 4; ++i) lanes[i] = moved_wide(lanes[i - 1], by512, lanes[i]);
  return finished_wide(lanes[3], data, bytes);
}

/// Fetched so far ahead, and no nearer than the second cache: few lines can be on their way to the first,
/// and the copy's own loads need these.
TILEWORK_PCLMUL inline void fetch_ahead(const unsigned char* from, size_t apart) {
  __builtin_prefetch(from + 2 * apart, 0, 2);
}

/// One register is enough here: memory takes longer than its products do.
TILEWORK_VPCLMUL uint32_t runs_by_vpclmul(const RunsToCopy& runs, const long long* across,
                                          uint32_t state) {
  const __m512i within = wide_constant(kBy512), past_gap = wide_constant(across);
  __m512i register_ = _mm512_set_epi64(0, 0, 0, 0, 0, 0, 0, static_cast<long long>(state));
  const unsigned char* from = runs.from;
  unsigned char* to = runs.to;
  for (size_t k = 0; k < runs.count; ++k, from += runs.apart, to += runs.to_apart)
    for (size_t at = 0; at < runs.run; at += 64) {
      const __m512i next = load_wide(from + at);
      fetch_ahead(from + at, runs.apart);
      store_wide(to + at, next);
      if (k == 0 && at == 0)
        register_ = _mm512_xor_si512(register_, next);
      else
        register_ = moved_wide(register_, at == 0 ? past_gap : within, next);
    }
  return finished_wide(register_, nullptr, 0);
}

TILEWORK_PCLMUL uint32_t runs_by_pclmul(const RunsToCopy& runs, const long long* across,
                                        uint32_t state) {
  __m128i lanes[4] = {_mm_cvtsi32_si128(static_cast<int>(state)), _mm_setzero_si128(),
                      _mm_setzero_si128(), _mm_setzero_si128()};
  const unsigned char* from = runs.from;
  unsigned char* to = runs.to;
  for (size_t k = 0; k < runs.count; ++k, from += runs.apart, to += runs.to_apart)
    for (size_t at = 0; at < runs.run; at += 64) {
      __m128i line[4];
      fetch_ahead(from + at, runs.apart);
      load_line(from + at, to + at, line);
      const bool first = k == 0 && at == 0;
      const long long* by = at == 0 ? across : kBy512;
      for (int i = 0; i < 4; ++i)
        lanes[i] = _mm_xor_si128(first ? lanes[i] : moved(lanes[i], by), line[i]);
    }
  for (int i = 1; i < 4; ++i) lanes[i] = _mm_xor_si128(moved(lanes[i - 1], kBy128), lanes[i]);
  return finished(lanes[3], nullptr, 0);
}

bool has_pclmul() { return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"); }

bool has_vpclmul() {
  return has_pclmul() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq");
}

uint32_t advanced(const unsigned char* data, size_t bytes, uint32_t state) {
  static const bool folds = has_pclmul(), folds_wide = has_vpclmul();
  if (folds_wide && bytes >= 1024) return by_vpclmul<false>(data, bytes, state, nullptr, 0);
  if (folds && bytes >= 128) return by_pclmul<false>(data, bytes, state, nullptr, 0);
  return by_words(data, bytes, state);
}

/// To whole lines: `bytes` is a multiple of 256.
uint32_t advanced_copying(unsigned char* to, const unsigned char* data, size_t bytes,
                          uint32_t state, size_t ahead) {
  static const bool folds = has_pclmul(), folds_wide = has_vpclmul();
  if (folds_wide) return by_vpclmul<true>(data, bytes, state, to, ahead);
  if (folds) return by_pclmul<true>(data, bytes, state, to, ahead);
  copy_past_caches(to, data, bytes);
  return by_words(data, bytes, state);
}

bool folds_runs() {
  static const bool folds = has_pclmul();
  return folds;
}

/// `across` moves a register past a gap and 64 bytes.
uint32_t advanced_by_runs(const RunsToCopy& runs, const long long* across, uint32_t state) {
  static const bool folds_wide = has_vpclmul();
  return folds_wide ? runs_by_vpclmul(runs, across, state) : runs_by_pclmul(runs, across, state);
}

#else

bool folds_runs() { return false; }

uint32_t advanced_by_runs(const RunsToCopy&, const long long*, uint32_t state) { return state; }

/// In pieces that are still in the nearest cache when they are copied.
uint32_t advanced_copying(unsigned char* to, const unsigned char* data, size_t bytes,
                          uint32_t state, size_t) {
  constexpr size_t kPiece = 8192;
  for (size_t done = 0; done < bytes; done += kPiece) {
    const size_t piece = std::min(kPiece, bytes - done);
    state = by_words(data + done, piece, state);
    copy_past_caches(to + done, data + done, piece);
  }
  return state;
}

uint32_t advanced(const unsigned char* data, size_t bytes, uint32_t state) {
  return by_words(data, bytes, state);
}

#endif

uint32_t copied(void* to, const void* data, size_t bytes, uint32_t state, size_t ahead) {
  constexpr size_t kLineBytes = 64, kBlock = 256, kShortest = 1024;
  auto* target = static_cast<unsigned char*>(to);
  auto* source = static_cast<const unsigned char*>(data);
  if (bytes < kShortest) {
    copy(to, data, bytes);
    return advanced(source, bytes, state);
  }
  const size_t head = -reinterpret_cast<uintptr_t>(to) % kLineBytes;
  const size_t body = (bytes - head) / kBlock * kBlock, tail = bytes - head - body;
  copy(target, source, head);
  copy(target + head + body, source + head + body, tail);
  state = advanced(source, head, state);
  state = advanced_copying(target + head, source + head, body, state, ahead);
  return advanced(source + head + body, tail, state);
}

// -- polynomials of degree 31 at most, the highest bit for x^0 -------------------------------

constexpr uint32_t product(uint32_t a, uint32_t b) {
  uint32_t sum = 0;
  for (int bit = 31; bit >= 0; --bit) {
    sum ^= b & (0 - ((a >> bit) & 1));
    b = (b >> 1) ^ (kPolynomial & (0 - (b & 1)));
  }
  return sum;
}

/// x to the 8 times 2^k: by that as many bytes move a state.
constexpr std::array<uint32_t, 48> make_powers() {
  std::array<uint32_t, 48> powers{};
  powers[0] = uint32_t{1} << (31 - 8);
  for (size_t k = 1; k < powers.size(); ++k) powers[k] = product(powers[k - 1], powers[k - 1]);
  return powers;
}

constexpr auto kPowers = make_powers();

uint32_t factor_of(size_t bytes) {
  uint32_t factor = uint32_t{1} << 31;
  for (size_t k = 0; bytes != 0 && k < kPowers.size(); ++k, bytes >>= 1)
    if (bytes & 1) factor = product(factor, kPowers[k]);
  return factor;
}

}  // namespace

uint32_t crc32(const void* data, size_t bytes, uint32_t crc) {
  return ~advanced(static_cast<const unsigned char*>(data), bytes, ~crc);
}

uint32_t copy_crc32(void* to, const void* data, size_t bytes, uint32_t crc) {
  return ~copied(to, data, bytes, ~crc, 0);
}

void Crc32Share::close_gap() {
  if (gap_ == 0 || state_ == 0) return void(gap_ = 0);
  if (gap_ != known_gap_) known_gap_ = gap_, known_factor_ = factor_of(gap_);
  state_ = product(state_, known_factor_);
  gap_ = 0;
}

void Crc32Share::add(const void* data, size_t bytes) {
  close_gap();
  state_ = advanced(static_cast<const unsigned char*>(data), bytes, state_);
}

void Crc32Share::copy(void* to, const void* data, size_t bytes, size_t ahead) {
  close_gap();
  state_ = copied(to, data, bytes, state_, ahead);
}

void Crc32Share::copy_runs(void* to, int64_t to_apart, const void* data, size_t apart, size_t run,
                           size_t count) {
  auto* target = static_cast<unsigned char*>(to);
  const auto* source = static_cast<const unsigned char*>(data);
  const auto places = reinterpret_cast<uintptr_t>(to) | static_cast<uintptr_t>(to_apart) | run;
  if (places % 64 == 0 && count > 1 && folds_runs()) {
    close_gap();
    if (apart - run != known_apart_) {
      known_apart_ = apart - run;
      known_across_[0] = static_cast<long long>(factor_of(known_apart_ + 64 + 4)) << 1;
      known_across_[1] = static_cast<long long>(factor_of(known_apart_ + 64 - 4)) << 1;
    }
    const RunsToCopy runs = {target, to_apart, source, apart, run, count};
    state_ = advanced_by_runs(runs, known_across_, state_);
    return;
  }
  for (size_t k = 0; k < count; ++k, source += apart, target += to_apart) {
    if (k > 0) skip(apart - run);
    copy(target, source, run, apart);
  }
}

uint32_t Crc32Share::value() {
  close_gap();
  return state_;
}

}  // namespace tilework

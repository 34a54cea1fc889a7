// The loops of random.h. As reduce_kernels.cpp, and for the same reasons, this file is compiled once
// per level of the instruction set, without contraction to fused multiply-adds, and uses nothing
// from the standard library that has linkage.
#include "kernels/random.h"

#include <type_traits>

#include "kernels/elements.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "pairs of words are written as one");

namespace tilework {
namespace TILEWORK_LEVEL {
namespace {

__extension__ typedef unsigned __int128 uint128_t;

// ---- Philox4x32-10: 16 blocks at a time, each half of them in vectors of 64-bit lanes

// product() multiplies the lower halves of lanes; the upper halves are ignored.
#if defined(__AVX512F__)
using Lanes = uint64_t __attribute__((vector_size(64)));
inline Lanes product(Lanes a, Lanes b) {
  // The form without a mask makes GCC warn of a value that is not initialised.
  return reinterpret_cast<Lanes>(
      _mm512_maskz_mul_epu32(0xff, reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
}
#elif defined(__AVX2__)
using Lanes = uint64_t __attribute__((vector_size(32)));
inline Lanes product(Lanes a, Lanes b) {
  return reinterpret_cast<Lanes>(
      _mm256_mul_epu32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
}
#elif defined(__SSE2__)
using Lanes = uint64_t __attribute__((vector_size(16)));
inline Lanes product(Lanes a, Lanes b) {
  return reinterpret_cast<Lanes>(
      _mm_mul_epu32(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
}
#else
using Lanes = uint64_t;
inline Lanes product(Lanes a, Lanes b) { return (a & UINT32_MAX) * (b & UINT32_MAX); }
#endif

constexpr size_t kLanes = sizeof(Lanes) / sizeof(uint64_t);
constexpr size_t kBlocks = 16;

struct Counters {
  Lanes word[4];

  void round(uint32_t key0, uint32_t key1) {
    const Lanes p = product(word[0], Lanes{} + 0xD2511F53u);
    const Lanes q = product(word[2], Lanes{} + 0xCD9E8D57u);
    word[0] = (q >> 32) ^ word[1] ^ (Lanes{} + key0);
    word[1] = q;
    word[2] = (p >> 32) ^ word[3] ^ (Lanes{} + key1);
    word[3] = p;
  }
};

/// Blocks `first`, first + 2, … of those that `number` gives.
template <class Number>
inline Counters every_other(const Number& number, size_t first, uint64_t stream) {
  uint64_t numbers[kLanes];
  for (size_t i = 0; i < kLanes; ++i) numbers[i] = number(first + 2 * i);
  Counters counters;
  __builtin_memcpy(&counters.word[0], numbers, sizeof numbers);
  counters.word[1] = counters.word[0] >> 32;
  counters.word[2] = Lanes{} + stream;
  counters.word[3] = Lanes{} + (stream >> 32);
  return counters;
}

/// words[16 w + i] = word w of block number(i), for 16 blocks.
template <class Number>
inline void philox(const Number& number, const SampleParams& params, uint32_t* words) {
  for (size_t block = 0; block < kBlocks; block += 2 * kLanes) {
    Counters even = every_other(number, block, params.stream);
    Counters odd = every_other(number, block + 1, params.stream);
    auto key0 = static_cast<uint32_t>(params.seed), key1 = static_cast<uint32_t>(params.seed >> 32);
    for (int round = 0; round < 10; ++round) {
      even.round(key0, key1);
      odd.round(key0, key1);
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
    for (size_t w = 0; w < 4; ++w) {
      const Lanes both = (even.word[w] & (Lanes{} + UINT32_MAX)) | (odd.word[w] << 32);
      __builtin_memcpy(words + kBlocks * w + block, &both, sizeof both);
    }
  }
}

// ---- random bits of a group's elements, or of any 64

/// Draw a word for each element of a group, where a group has the 16 blocks from 16 * (every * group + part) on.
inline void draw_group(uint64_t group, int every, int part, const SampleParams& params,
                       uint32_t* words) {
  const uint64_t first = kBlocks * (every * group + part);
  philox([=](size_t i) { return first + i; }, params, words);
}

inline void draw_any(const uint64_t* indices, int every, int part, const SampleParams& params,
                     uint32_t* words) {
  for (size_t at = 0; at < kGroup; at += kBlocks) {
    const uint64_t* index = indices + at;
    const auto block = [=](size_t i) {
      return kBlocks * (every * (index[i] / kGroup) + part) + index[i] % kBlocks;
    };
    uint32_t drawn[4 * kBlocks];
    philox(block, params, drawn);
    for (size_t i = 0; i < kBlocks; ++i)
      words[at + i] = drawn[kBlocks * (index[i] % kGroup / kBlocks) + i];
  }
}

struct Bits32 {
  using Type = uint32_t;
  static void group(uint64_t group, const SampleParams& params, Type* bits) {
    draw_group(group, 1, 0, params, bits);
  }
  static void any(const uint64_t* indices, const SampleParams& params, Type* bits) {
    draw_any(indices, 1, 0, params, bits);
  }
};

struct Bits64 {
  using Type = uint64_t;
  static void group(uint64_t group, const SampleParams& params, Type* bits) {
    uint32_t low[kGroup], high[kGroup];
    draw_group(group, 2, 0, params, low);
    draw_group(group, 2, 1, params, high);
    join(low, high, bits);
  }
  static void any(const uint64_t* indices, const SampleParams& params, Type* bits) {
    uint32_t low[kGroup], high[kGroup];
    draw_any(indices, 2, 0, params, low);
    draw_any(indices, 2, 1, params, high);
    join(low, high, bits);
  }

 private:
  static void join(const uint32_t* low, const uint32_t* high, Type* bits) {
    TILEWORK_VECTORISE
    for (size_t i = 0; i < kGroup; ++i) bits[i] = low[i] | static_cast<uint64_t>(high[i]) << 32;
  }
};

// ---- arithmetic that processors lack, or lack in vectors

/// A polynomial; the coefficient of the highest power comes first.
template <class T, class... Rest>
inline T polynomial(T x, T value, Rest... coefficients) {
  ((value = value * x + coefficients), ...);
  return value;
}

/// Of an integer below 2^53, exactly: both halves become mantissas of numbers with fixed exponents.
inline double to_double(uint64_t x) {
  const double high = bits_of<double>(0x4530000000000000 | x >> 32) - 0x1p84;
  const double low = bits_of<double>(0x4330000000000000 | (x & UINT32_MAX)) - 0x1p52;
  return high + low;
}

/// The logarithm of a normal number up to 1 (S. Moshier's Cephes library).
inline float logarithm(float x) {
  const uint32_t bits = bits_of<uint32_t>(x);
  const auto exponent = static_cast<int32_t>(bits - 0x3f3504f3) >> 23;  // of x over [√½, √2)
  const float e = static_cast<float>(exponent);
  const float f = bits_of<float>(bits - (static_cast<uint32_t>(exponent) << 23)) - 1.0f;
  const float z = f * f;
  const float p = polynomial(f, 7.0376836292e-2f, -1.1514610310e-1f, 1.1676998740e-1f,
                             -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                             2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f);
  const float tail = p * f * z + e * -2.12194440e-4f - 0.5f * z;
  return (f + tail) + e * 0.693359375f;
}

/// The same (Sun's fdlibm).
inline double logarithm(double x) {
  const uint64_t bits = bits_of<uint64_t>(x);
  const uint64_t biased = (bits - 0x3fe6a09e667f3bcd + (uint64_t{1023} << 52)) >> 52;
  const double e = to_double(biased) - 1023.0;
  const double f = bits_of<double>(bits - ((biased - 1023) << 52)) - 1.0;
  const double s = f / (2.0 + f), z = s * s, half = 0.5 * f * f;
  const double r =
      polynomial(z, 1.479819860511658591e-01, 1.531383769920937332e-01, 1.818357216161805012e-01,
                 2.222219843214978396e-01, 2.857142874366239149e-01, 3.999999999940941908e-01,
                 6.666666666666735130e-01) *
      z;
  return e * 6.93147180369123816490e-01 -
         ((half - (s * (half + r) + e * 1.90821492927058770002e-10)) - f);
}

/// erf⁻¹(1 - t) / (1 - t) from w = -log(t (2 - t)), by one polynomial where w is below `centre_ends`
/// and by others in the tail (Giles 2010).
template <class T>
struct InverseErf;

template <>
struct InverseErf<float> {
  static constexpr float centre_ends = 5.0f;
  static float centre(float w) {
    return polynomial(w - 2.5f, 2.81022636e-08f, 3.43273939e-07f, -3.5233877e-06f, -4.39150654e-06f,
                      0.00021858087f, -0.00125372503f, -0.00417768164f, 0.246640727f, 1.50140941f);
  }
  static float tail(float w) {
    return polynomial(__builtin_sqrtf(w) - 3.0f, -0.000200214257f, 0.000100950558f, 0.00134934322f,
                      -0.00367342844f, 0.00573950773f, -0.0076224613f, 0.00943887047f, 1.00167406f,
                      2.83297682f);
  }
};

template <>
struct InverseErf<double> {
  static constexpr double centre_ends = 6.25;
  static double centre(double w) {
    return polynomial(
        w - 3.125, -3.6444120640178196996e-21, -1.685059138182016589e-19, 1.2858480715256400167e-18,
        1.115787767802518096e-17, -1.333171662854620906e-16, 2.0972767875968561637e-17,
        6.6376381343583238325e-15, -4.0545662729752068639e-14, -8.1519341976054721522e-14,
        2.6335093153082322977e-12, -1.2975133253453532498e-11, -5.4154120542946279317e-11,
        1.051212273321532285e-09, -4.1126339803469836976e-09, -2.9070369957882005086e-08,
        4.2347877827932403518e-07, -1.3654692000834678645e-06, -1.3882523362786468719e-05,
        0.0001867342080340571352, -0.00074070253416626697512, -0.0060336708714301490533,
        0.24015818242558961693, 1.6536545626831027356);
  }
  static double tail(double w) {
    const double root = __builtin_sqrt(w);
    const double middle =
        polynomial(root - 3.25, 2.2137376921775787049e-09, 9.0756561938885390979e-08,
                   -2.7517406297064545428e-07, 1.8239629214389227755e-08, 1.5027403968909827627e-06,
                   -4.013867526981545969e-06, 2.9234449089955446044e-06, 1.2475304481671778723e-05,
                   -4.7318229009055733981e-05, 6.8284851459573175448e-05, 2.4031110387097893999e-05,
                   -0.0003550375203628474796, 0.00095328937973738049703, -0.0016882755560235047313,
                   0.0024914420961078508066, -0.0037512085075692412107, 0.005370914553590063617,
                   1.0052589676941592334, 3.0838856104922207635);
    const double end = polynomial(
        root - 5.0, -2.7109920616438573243e-11, -2.5556418169965252055e-10,
        1.5076572693500548083e-09, -3.7894654401267369937e-09, 7.6157012080783393804e-09,
        -1.4960026627149240478e-08, 2.9147953450901080826e-08, -6.7711997758452339498e-08,
        2.2900482228026654717e-07, -9.9298272942317002539e-07, 4.5260625972231537039e-06,
        -1.9681778105531670567e-05, 7.5995277030017761139e-05, -0.00021503011930044477347,
        -0.00013871931833623122026, 1.0103004648645343977, 4.8499064014085844221);
    return w < 16.0 ? middle : end;
  }
};

// ---- conversion of an element's bits to values

inline float fraction(uint32_t bits) { return static_cast<float>(bits >> 8) * 0x1p-24f; }
inline double fraction(uint64_t bits) { return to_double(bits >> 11) * 0x1p-53; }

/// Everything but the sign bit, in (0, 1].
inline float magnitude(uint32_t bits) {
  return (static_cast<float>(static_cast<int32_t>(bits & 0x7fffffff)) + 0.5f) * 0x1p-31f;
}
inline double magnitude(uint64_t bits) {
  return (to_double(bits >> 10 & 0x1fffffffffffff) + 0.5) * 0x1p-53;
}

inline float with_sign(float x, uint32_t bits) {
  return bits_of<float>(bits_of<uint32_t>(x) | (bits & 0x80000000));
}
inline double with_sign(double x, uint64_t bits) {
  return bits_of<double>(bits_of<uint64_t>(x) | (bits & 0x8000000000000000));
}

/// The next lower number, of any format that has its sign in the first bit.
template <class Bits>
inline Bits next_below(Bits bits) {
  const Bits sign = static_cast<Bits>(Bits{1} << (8 * sizeof(Bits) - 1));
  if (static_cast<Bits>(bits << 1) == 0) return sign | 1;
  return static_cast<Bits>(bits & sign ? bits + 1 : bits - 1);
}

template <class Element, class Bits>
struct Uniform {
  using Value = typename Element::Value;
  using Stored = typename Element::Stored;
  const Value low, scale;
  Value last;  // sums may round to the upper bound

  explicit Uniform(const SampleParams& params)
      : low(static_cast<Value>(params.a)), scale(static_cast<Value>(params.b - params.a)) {
    using Raw = std::conditional_t<sizeof(Stored) == 2, uint16_t, typename Bits::Type>;
    const auto high = bits_of<Raw>(Element::store(static_cast<Value>(params.b)));
    last = Element::load(bits_of<Stored>(next_below(high)));
    if (last < low) last = low;
  }
  Value operator()(typename Bits::Type bits) const {
    const Value value = low + fraction(bits) * scale;
    return value < last ? value : last;
  }
};

/// Of a group, with mean 0 and deviation 1.
template <class Word, class Value>
inline void standard_normal(const Word* bits, Value* values) {
  using Inverse = InverseErf<Value>;
  Value w[kGroup], rest[kGroup];
  TILEWORK_VECTORISE
  for (size_t i = 0; i < kGroup; ++i) {
    const Value t = magnitude(bits[i]);
    w[i] = -logarithm(t * (2 - t));
    rest[i] = 1 - t;
    values[i] = Inverse::centre(w[i]);
  }
  Word in_tail = 0;
  for (size_t i = 0; i < kGroup; ++i) in_tail |= w[i] < Inverse::centre_ends ? 0 : 1;
  if (in_tail) {  // of few groups
    TILEWORK_VECTORISE
    for (size_t i = 0; i < kGroup; ++i)
      values[i] = w[i] < Inverse::centre_ends ? values[i] : Inverse::tail(w[i]);
  }
  const auto root2 = static_cast<Value>(1.4142135623730951);
  TILEWORK_VECTORISE
  for (size_t i = 0; i < kGroup; ++i) values[i] = with_sign(values[i] * rest[i] * root2, bits[i]);
}

template <class Element, class Bits>
struct Normal {
  using Value = typename Element::Value;
  const Value mean, deviation;

  explicit Normal(const SampleParams& params)
      : mean(static_cast<Value>(params.a)), deviation(static_cast<Value>(params.b)) {}
  Value operator()(Value standard) const { return mean + deviation * standard; }
};

template <class Element, class Bits>
struct Bernoulli {
  using Value = typename Element::Stored;
  uint32_t last;  // a success, and those before it
  Value success;

  explicit Bernoulli(const SampleParams& params) : success(stored(params.b)) {
    const auto count = static_cast<uint64_t>(params.a * 0x1p32 + 0.5);
    last = static_cast<uint32_t>(count - 1);
    if (count == 0) success = Value{};
  }
  static Value stored(double value) {
    return Element::store(static_cast<typename Element::Value>(value));
  }
  Value operator()(uint32_t bits) const { return bits <= last ? success : Value{}; }
};

/// Sums wrap: `Value` is unsigned.
template <class Element, class Bits>
struct Integers {
  using Value = typename Element::Value;
  const uint64_t span;
  const Value low;

  explicit Integers(const SampleParams& params)
      : span(params.span), low(static_cast<Value>(params.low)) {}
  Value operator()(uint32_t bits) const {
    return static_cast<Value>(low + static_cast<Value>(bits * span >> 32));
  }
  Value operator()(uint64_t bits) const {
    const auto upper = static_cast<uint64_t>(static_cast<uint128_t>(bits) * span >> 64);
    return static_cast<Value>(low + static_cast<Value>(span == 0 ? bits : upper));
  }
};

// ---- the loops

template <class Element>
struct Storing {
  template <class From, class Make>
  static void store(typename Element::Stored* to, const From* from, const Make& make) {
    TILEWORK_VECTORISE
    for (size_t i = 0; i < kGroup; ++i) to[i] = Element::store(make(from[i]));
  }
};

#if defined(__F16C__)
template <>
struct Storing<Float16> {
  template <class From, class Make>
  static void store(uint16_t* to, const From* from, const Make& make) {
    float values[kGroup];
    Storing<Plain<float>>::store(values, from, make);
    narrow(to, values, kGroup);
  }
};
#endif

template <class Storage, class Stored, class Word, class Make>
inline void convert(Stored* to, const Word* bits, const Make& make) {
  Storing<Storage>::store(to, bits, make);
}

template <class Storage, class Stored, class Word, class Element, class Bits>
inline void convert(Stored* to, const Word* bits, const Normal<Element, Bits>& make) {
  typename Element::Value values[kGroup];
  standard_normal(bits, values);
  Storing<Storage>::store(to, values, make);
}

template <class Element, class Bits, template <class, class> class Make, class Storage>
struct Loops {
  using Stored = typename Element::Stored;

  static void groups(void* to, uint64_t group, size_t groups, const SampleParams& params) {
    const Make<Element, Bits> make(params);
    for (size_t i = 0; i < groups; ++i) {
      typename Bits::Type bits[kGroup];
      Bits::group(group + i, params, bits);
      convert<Storage>(static_cast<Stored*>(to) + kGroup * i, bits, make);
    }
  }

  static void any(void* to, const uint64_t* indices, const SampleParams& params) {
    const Make<Element, Bits> make(params);
    typename Bits::Type bits[kGroup];
    Bits::any(indices, params, bits);
    convert<Storage>(static_cast<Stored*>(to), bits, make);
  }
};

template <class Element, class Bits, template <class, class> class Make, class Storage = Element>
Sampler sampler() {
  using L = Loops<Element, Bits, Make, Storage>;
  return {L::groups, L::any};
}

// ---- the distributions of each dtype

template <class Element, class Bits>
Sampler find_floating(Distribution distribution) {
  switch (distribution) {
    case Distribution::kUniform: return sampler<Element, Bits, Uniform>();
    case Distribution::kNormal: return sampler<Element, Bits, Normal>();
    case Distribution::kBernoulli:
      return sampler<Element, Bits32, Bernoulli, Plain<typename Element::Stored>>();
    default: return {};
  }
}

template <class Unsigned>
Sampler find_integers(Distribution distribution, bool wide) {
  if (distribution != Distribution::kIntegers) return {};
  return wide ? sampler<Plain<Unsigned>, Bits64, Integers>()
              : sampler<Plain<Unsigned>, Bits32, Integers>();
}

}  // namespace

Sampler find_sampler(unsigned dtype, unsigned distribution, bool wide);  // declared in random.cpp

Sampler find_sampler(unsigned dtype, unsigned distribution, bool wide) {
  const auto d = static_cast<Distribution>(distribution);
  switch (static_cast<DType>(dtype)) {
    case DType::kFloat64: return find_floating<Plain<double>, Bits64>(d);
    case DType::kFloat32: return find_floating<Plain<float>, Bits32>(d);
    case DType::kFloat16: return find_floating<Float16, Bits32>(d);
    case DType::kBFloat16: return find_floating<BFloat16, Bits32>(d);
    case DType::kInt64:
    case DType::kUInt64: return find_integers<uint64_t>(d, wide);
    case DType::kInt32:
    case DType::kUInt32: return find_integers<uint32_t>(d, wide);
    case DType::kInt16:
    case DType::kUInt16: return find_integers<uint16_t>(d, wide);
    case DType::kInt8:
    case DType::kUInt8: return find_integers<uint8_t>(d, wide);
    case DType::kBool:
      if (d == Distribution::kBernoulli) return sampler<Bool, Bits32, Bernoulli>();
      return find_integers<uint8_t>(d, wide);
    default: return {};
  }
}

}  // namespace TILEWORK_LEVEL
}  // namespace tilework

// The loops of reduce.h. CMake compiles this file once per level of the instruction set, with
// TILEWORK_LEVEL as the namespace. It must not use anything from the standard library that has
// linkage: the linker would keep one copy of it, maybe one that this processor cannot run.
//
// -ffp-contract=off is required: a fused multiply-add in the vector body and none in the tail
// would make bits depend on where a piece begins. -fno-trapping-math lets the compiler compute both
// sides of a choice, which it must to vectorise it; results stay the same.
#include "kernels/reduce.h"

#include "kernels/elements.h"

namespace tilework {
namespace TILEWORK_LEVEL {
namespace {

template <class T>
struct ComplexValue {
  T re, im;
};

template <class T>
struct Complex {
  using Stored = ComplexValue<T>;
  using Value = ComplexValue<T>;
  static Value load(Stored x) { return x; }
  static Stored store(Value x) { return x; }
};

// ---- operations

struct Sum {
  template <class V>
  static V apply(V a, V b) {
    return static_cast<V>(a + b);
  }
  template <class T>
  static ComplexValue<T> apply(ComplexValue<T> a, ComplexValue<T> b) {
    return {a.re + b.re, a.im + b.im};
  }
};

struct Product {
  template <class V>
  static V apply(V a, V b) {
    return a * b;
  }
  // uint16_t would be promoted to int, whose overflow is undefined.
  static uint8_t apply(uint8_t a, uint8_t b) { return static_cast<uint8_t>(uint32_t{a} * b); }
  static uint16_t apply(uint16_t a, uint16_t b) { return static_cast<uint16_t>(uint32_t{a} * b); }
  template <class T>
  static ComplexValue<T> apply(ComplexValue<T> a, ComplexValue<T> b) {
    return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
  }
};

template <class V>
inline bool is_nan(V x) {
  return x != x;
}

struct Min {
  template <class V>
  static V apply(V a, V b) {
    return ((a < b) | is_nan(a)) ? a : b;
  }
};

struct Max {
  template <class V>
  static V apply(V a, V b) {
    return ((a > b) | is_nan(a)) ? a : b;
  }
};

struct And {
  template <class V>
  static V apply(V a, V b) {
    return static_cast<V>(a & b);
  }
};

struct Or {
  template <class V>
  static V apply(V a, V b) {
    return static_cast<V>(a | b);
  }
};

struct Xor {
  template <class V>
  static V apply(V a, V b) {
    return static_cast<V>(a ^ b);
  }
};

// ---- scaling of a contribution before, and of the result after the reduction

template <class V>
inline V times(V x, double factor) {
  return x * static_cast<V>(factor);
}
template <class T>
inline ComplexValue<T> times(ComplexValue<T> x, double factor) {
  return {x.re * static_cast<T>(factor), x.im * static_cast<T>(factor)};
}
template <class V>
inline V over(V x, int ranks) {
  return x / static_cast<V>(ranks);
}
template <class T>
inline ComplexValue<T> over(ComplexValue<T> x, int ranks) {
  return {x.re / static_cast<T>(ranks), x.im / static_cast<T>(ranks)};
}

struct AsIs {
  template <class V>
  static V before(V x, double) {
    return x;
  }
  template <class V>
  static V after(V x, int) {
    return x;
  }
};

struct Scaled : AsIs {
  template <class V>
  static V before(V x, double factor) {
    return times(x, factor);
  }
};

struct Averaged : AsIs {
  template <class V>
  static V after(V x, int ranks) {
    return over(x, ranks);
  }
};

// ---- the loops

template <class Type, class Op, class Around>
struct Loops {
  using Stored = typename Type::Stored;
  using Value = typename Type::Value;

  static Value get(Stored x, double factor) { return Around::before(Type::load(x), factor); }
  static Stored put(Value x, int ranks) { return Type::store(Around::after(x, ranks)); }

  static void one(Stored* to, const Stored* a, const double* factors, size_t count) {
    const double fa = factors[0];
    TILEWORK_VECTORISE
    for (size_t i = 0; i < count; ++i) to[i] = put(get(a[i], fa), 1);
  }

  static void two(Stored* to, const Stored* a, const Stored* b, const double* factors,
                  size_t count) {
    const double fa = factors[0], fb = factors[1];
    TILEWORK_VECTORISE
    for (size_t i = 0; i < count; ++i) to[i] = put(Op::apply(get(a[i], fa), get(b[i], fb)), 2);
  }

  // Three loops for more ranks. Not inlined: GCC would merge them over ranks, then not vectorise.
  TILEWORK_NOINLINE static void begin(Value* sum, const Stored* a, const Stored* b,
                                      const double* factors, size_t count) {
    const double fa = factors[0], fb = factors[1];
    TILEWORK_VECTORISE
    for (size_t i = 0; i < count; ++i) sum[i] = Op::apply(get(a[i], fa), get(b[i], fb));
  }
  TILEWORK_NOINLINE static void add(Value* sum, const Stored* next, double factor, size_t count) {
    TILEWORK_VECTORISE
    for (size_t i = 0; i < count; ++i) sum[i] = Op::apply(sum[i], get(next[i], factor));
  }
  TILEWORK_NOINLINE static void end(Stored* to, const Value* sum, const Stored* last, double factor,
                                    int ranks, size_t count) {
    TILEWORK_VECTORISE
    for (size_t i = 0; i < count; ++i) to[i] = put(Op::apply(sum[i], get(last[i], factor)), ranks);
  }

  /// Block by block, through a sum that stays in the first-level cache.
  static void many(Stored* to, const void* const* sources, const double* factors, int ranks,
                   size_t count) {
    constexpr size_t kBlock = 8192 / sizeof(Value);
    alignas(64) Value sum[kBlock];
    for (size_t at = 0; at < count; at += kBlock) {
      const size_t block = count - at < kBlock ? count - at : kBlock;
      auto source = [&](int rank) { return static_cast<const Stored*>(sources[rank]) + at; };
      begin(sum, source(0), source(1), factors, block);
      for (int rank = 2; rank < ranks - 1; ++rank) add(sum, source(rank), factors[rank], block);
      end(to + at, sum, source(ranks - 1), factors[ranks - 1], ranks, block);
    }
  }
};

#if defined(__F16C__)
/// float16 by the processor's own conversions, which compilers do not vectorise by themselves.
/// They round as Float16 does.
template <class Op, class Around>
struct Loops<Float16, Op, Around> {
  using Stored = uint16_t;
  static constexpr size_t kBlock = 2048;

  TILEWORK_NOINLINE static void first(float* sum, double factor, size_t count) {
    TILEWORK_VECTORISE
    for (size_t i = 0; i < count; ++i) sum[i] = Around::before(sum[i], factor);
  }
  TILEWORK_NOINLINE static void add(float* sum, const float* next, double factor, size_t count) {
    TILEWORK_VECTORISE
    for (size_t i = 0; i < count; ++i) sum[i] = Op::apply(sum[i], Around::before(next[i], factor));
  }
  TILEWORK_NOINLINE static void last(float* sum, int ranks, size_t count) {
    TILEWORK_VECTORISE
    for (size_t i = 0; i < count; ++i) sum[i] = Around::after(sum[i], ranks);
  }

  static void many(Stored* to, const void* const* sources, const double* factors, int ranks,
                   size_t count) {
    alignas(64) float sum[kBlock], next[kBlock];
    for (size_t at = 0; at < count; at += kBlock) {
      const size_t block = count - at < kBlock ? count - at : kBlock;
      for (int rank = 0; rank < ranks; ++rank) {
        widen(rank ? next : sum, static_cast<const Stored*>(sources[rank]) + at, block);
        if (rank == 0)
          first(sum, factors[0], block);
        else
          add(sum, next, factors[rank], block);
      }
      last(sum, ranks, block);
      narrow(to + at, sum, block);
    }
  }
  static void one(Stored* to, const Stored* a, const double* factors, size_t count) {
    const void* source = a;
    many(to, &source, factors, 1, count);
  }
  static void two(Stored* to, const Stored* a, const Stored* b, const double* factors,
                  size_t count) {
    const void* sources[] = {a, b};
    many(to, sources, factors, 2, count);
  }
};
#endif

template <class Type, class Op, class Around = AsIs>
void reduce(void* destination, const void* const* sources, const double* factors, int ranks,
            size_t count) {
  using L = Loops<Type, Op, Around>;
  using Stored = typename Type::Stored;
  auto* to = static_cast<Stored*>(destination);
  auto* first = static_cast<const Stored*>(sources[0]);
  if (ranks == 1) return L::one(to, first, factors, count);
  if (ranks > 2) return L::many(to, sources, factors, ranks, count);
  L::two(to, first, static_cast<const Stored*>(sources[1]), factors, count);
}

// ---- the reductions of each dtype

template <class Type>
Reduction find_floating(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum: return reduce<Type, Sum>;
    case ReduceOp::kAvg: return reduce<Type, Sum, Averaged>;
    case ReduceOp::kPremulSum: return reduce<Type, Sum, Scaled>;
    case ReduceOp::kProduct: return reduce<Type, Product>;
    case ReduceOp::kMin: return reduce<Type, Min>;
    case ReduceOp::kMax: return reduce<Type, Max>;
    default: return nullptr;
  }
}

template <class T>
Reduction find_complex(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum: return reduce<Complex<T>, Sum>;
    case ReduceOp::kAvg: return reduce<Complex<T>, Sum, Averaged>;
    case ReduceOp::kPremulSum: return reduce<Complex<T>, Sum, Scaled>;
    case ReduceOp::kProduct: return reduce<Complex<T>, Product>;
    default: return nullptr;
  }
}

/// Sums and products wrap, so they run on the unsigned type, whose overflow is defined.
template <class T, class Unsigned>
Reduction find_integer(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum: return reduce<Plain<Unsigned>, Sum>;
    case ReduceOp::kProduct: return reduce<Plain<Unsigned>, Product>;
    case ReduceOp::kMin: return reduce<Plain<T>, Min>;
    case ReduceOp::kMax: return reduce<Plain<T>, Max>;
    case ReduceOp::kBand: return reduce<Plain<Unsigned>, And>;
    case ReduceOp::kBor: return reduce<Plain<Unsigned>, Or>;
    case ReduceOp::kBxor: return reduce<Plain<Unsigned>, Xor>;
    default: return nullptr;
  }
}

Reduction find_bool(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMax:
    case ReduceOp::kBor: return reduce<Bool, Or>;
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
    case ReduceOp::kBand: return reduce<Bool, And>;
    case ReduceOp::kBxor: return reduce<Bool, Xor>;
    default: return nullptr;
  }
}

}  // namespace

Reduction find(unsigned dtype, unsigned reduce_op);  // declared where it is used: reduce.cpp

Reduction find(unsigned dtype, unsigned reduce_op) {
  const auto op = static_cast<ReduceOp>(reduce_op);
  switch (static_cast<DType>(dtype)) {
    case DType::kFloat64: return find_floating<Plain<double>>(op);
    case DType::kFloat32: return find_floating<Plain<float>>(op);
    case DType::kFloat16: return find_floating<Float16>(op);
    case DType::kBFloat16: return find_floating<BFloat16>(op);
    case DType::kInt64: return find_integer<int64_t, uint64_t>(op);
    case DType::kInt32: return find_integer<int32_t, uint32_t>(op);
    case DType::kInt16: return find_integer<int16_t, uint16_t>(op);
    case DType::kInt8: return find_integer<int8_t, uint8_t>(op);
    case DType::kUInt8: return find_integer<uint8_t, uint8_t>(op);
    case DType::kUInt16: return find_integer<uint16_t, uint16_t>(op);
    case DType::kUInt32: return find_integer<uint32_t, uint32_t>(op);
    case DType::kUInt64: return find_integer<uint64_t, uint64_t>(op);
    case DType::kBool: return find_bool(op);
    case DType::kComplex64: return find_complex<float>(op);
    case DType::kComplex128: return find_complex<double>(op);
    case DType::kBytes: return nullptr;
  }
  return nullptr;
}

}  // namespace TILEWORK_LEVEL
}  // namespace tilework

// Operation kinds, dtypes and reduce operations: small integers, under torch's names.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tilework {

enum class OpKind : uint8_t {
  kBarrier,
  kBroadcast,
  kAllReduce,
  kReduce,
  kScan,
  kExscan,
  kAllGather,
  kGather,
  kScatter,
  kReduceScatter,
  kAllToAll
};
constexpr const char* kKindNames[] = {"barrier", "broadcast",      "all_reduce", "reduce",
                                      "scan",    "exscan",         "all_gather", "gather",
                                      "scatter", "reduce_scatter", "all_to_all"};

enum class DType : uint8_t {
  kFloat64,
  kFloat32,
  kFloat16,
  kBFloat16,
  kInt64,
  kInt32,
  kInt16,
  kInt8,
  kUInt8,
  kUInt16,
  kUInt32,
  kUInt64,
  kBool,
  kComplex64,
  kComplex128,
  kBytes
};
constexpr const char* kDTypeNames[] = {
    "float64", "float32", "float16", "bfloat16", "int64", "int32",     "int16",      "int8",
    "uint8",   "uint16",  "uint32",  "uint64",   "bool",  "complex64", "complex128", "bytes"};
constexpr size_t kItemBytes[] = {8, 4, 2, 2, 8, 4, 2, 1, 1, 2, 4, 8, 1, 8, 16, 1};

enum class ReduceOp : uint8_t {
  kNone,
  kSum,
  kAvg,
  kProduct,
  kMin,
  kMax,
  kBand,
  kBor,
  kBxor,
  kPremulSum
};
constexpr const char* kReduceOpNames[] = {"none", "sum",  "avg", "product", "min",
                                          "max",  "band", "bor", "bxor",    "premul_sum"};

template <class T, size_t Count>
constexpr size_t count_of(T (&)[Count]) {
  return Count;
}
constexpr size_t kKinds = count_of(kKindNames);
constexpr size_t kDTypes = count_of(kDTypeNames);
constexpr size_t kReduceOps = count_of(kReduceOpNames);
static_assert(count_of(kItemBytes) == kDTypes, "every dtype has a size");

/// Names of values that came from another process and may be anything.
inline const char* kind_name(unsigned kind) { return kind < kKinds ? kKindNames[kind] : "?"; }
inline const char* dtype_name(unsigned dtype) { return dtype < kDTypes ? kDTypeNames[dtype] : "?"; }
inline const char* reduce_op_name(unsigned op) {
  return op < kReduceOps ? kReduceOpNames[op] : "?";
}

/// True if each rank gets the reduction of a part of the ranks. The root is then the end of the group
/// from which ranks are counted: the first or the last rank.
inline bool scans(OpKind kind) { return kind == OpKind::kScan || kind == OpKind::kExscan; }

inline bool reduces(OpKind kind) {
  return kind == OpKind::kAllReduce || kind == OpKind::kReduce || scans(kind) ||
         kind == OpKind::kReduceScatter;
}

/// True if one rank sends everything, or receives it.
inline bool rooted(OpKind kind) {
  return kind == OpKind::kBroadcast || kind == OpKind::kReduce || kind == OpKind::kGather ||
         kind == OpKind::kScatter;
}

/// True if ranks may pass different sizes, which they then publish in byte-count tables.
inline bool ragged(OpKind kind) { return kind >= OpKind::kAllGather; }

}  // namespace tilework

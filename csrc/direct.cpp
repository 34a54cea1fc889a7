#include "direct.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <stdexcept>

namespace tilework {
namespace {

/// What users call an operation, and in which form they pass each side.
struct Form {
  const char* name;
  Kind kind;
  bool input_list = false, output_list = false, rooted = false;
};
constexpr Form kForms[] = {
    {"all_reduce", Kind::kAllReduce},
    {"broadcast", Kind::kBroadcast, false, false, true},
    {"all_gather_into_tensor", Kind::kAllGather},
    {"reduce_scatter_tensor", Kind::kReduceScatter},
    {"all_to_all_single", Kind::kAllToAll},
    {"barrier", Kind::kBarrier},
    {"all_gather", Kind::kAllGather, false, true},
    {"reduce_scatter", Kind::kReduceScatter, true},
    {"all_to_all", Kind::kAllToAll, true, true},
    {"reduce", Kind::kReduce, false, false, true},
    {"gather", Kind::kGather, false, true, true},
    {"scatter", Kind::kScatter, true, false, true},
};
constexpr size_t kFormCount = count_of(kForms);

/// The objects by which Python names forms and reductions, found by identity.
struct Names {
  PyObject* forms[kFormCount];
  PyObject* reductions[kReduceOps] = {};

  Names() {
    for (size_t i = 0; i < kFormCount; ++i) forms[i] = PyUnicode_InternFromString(kForms[i].name);
  }
};

Names& names() {
  static auto* all = new Names();
  return *all;
}

bool find(PyObject* const* table, size_t count, PyObject* object, unsigned& index) {
  for (index = 0; index < count; ++index)
    if (table[index] == object) return true;
  return false;
}

/// One side of an operation.
class Side {
 public:
  /// False if the tensors cannot be used as they are, or are not what the operation takes.
  bool read(nb::handle given, bool as_list, int expected, nb::handle rows, bool strided) {
    if (given.is_none()) return expected == 0;
    if (as_list) return read_list(given, expected, strided);
    Seen seen;
    const bool divided = expected > 1 || !rows.is_none();
    if (expected == 0 || !see(given.ptr(), seen, strided && !divided)) return false;
    note(seen, 1);
    if (divided) return divide(seen, expected, rows);
    add(seen.buffer);
    return true;
  }

  /// Whether no two tensors share memory.
  bool apart() const {
    const Buffer* end = items() + size_;
    const auto before = [](const Buffer& a, const Buffer& b) { return a.data < b.data; };
    const auto touch = [](const Buffer& a, const Buffer& b) { return a.data + a.span() > b.data; };
    if (std::adjacent_find(items(), end, touch) == end) return true;
    std::vector<Buffer> sorted;
    for (const Buffer* item = items(); item < end; ++item)
      if (item->bytes > 0) sorted.push_back(*item);
    std::sort(sorted.begin(), sorted.end(), before);
    // Strided ones may lie within each other, so those beside each other are not all.
    for (size_t i = 0; i < sorted.size(); ++i)
      for (size_t j = i + 1; j < sorted.size() && touch(sorted[i], sorted[j]); ++j)
        if (overlap(sorted[i], sorted[j])) return false;
    return true;
  }

  Buffers view() const { return {items(), size_}; }

  DType dtype = DType::kBytes;
  Shape shape;    // of the first tensor
  int count = 0;  // of tensors

 private:
  void note(const Seen& seen, int tensors) {
    dtype = seen.dtype;
    shape = seen.shape;
    count = tensors;
  }

  bool read_list(nb::handle given, int expected, bool strided) {
    if (!PyList_Check(given.ptr()) && !PyTuple_Check(given.ptr())) return false;
    kept_ = nb::steal(PySequence_Tuple(given.ptr()));  // another thread may change the list
    if (!kept_.is_valid()) throw nb::python_error();
    const Py_ssize_t tensors = PyTuple_GET_SIZE(kept_.ptr());
    if (tensors != expected || tensors == 0) return false;
    PyObject** items = PySequence_Fast_ITEMS(kept_.ptr());
    for (Py_ssize_t i = 0; i < tensors; ++i) {
      Seen seen;
      if (!see(items[i], seen, strided) || (i > 0 && seen.dtype != dtype)) return false;
      if (i == 0) note(seen, expected);
      add(seen.buffer);
    }
    return true;
  }

  /// A tensor that stands for a part for each rank.
  bool divide(const Seen& seen, int parts, nb::handle rows) {
    char* const data = seen.buffer.data;
    const size_t bytes = seen.buffer.bytes;
    if (!rows.is_none()) return divide_rows(seen, parts, rows);
    if (bytes % (parts * kItemBytes[static_cast<size_t>(dtype)]) != 0) return false;
    for (int i = 0; i < parts; ++i) add({data + bytes / parts * i, bytes / parts});
    return true;
  }

  bool divide_rows(const Seen& seen, int parts, nb::handle rows) {
    if (!PyList_Check(rows.ptr()) || PyList_GET_SIZE(rows.ptr()) != parts || seen.shape.dims == 0)
      return false;
    const int64_t all = seen.shape.sizes[0];
    int64_t done = 0;
    for (int i = 0; i < parts; ++i) {
      const int64_t mine = PyLong_AsLongLong(PyList_GET_ITEM(rows.ptr(), i));
      if (mine < 0 || mine > all - done) {
        PyErr_Clear();
        return false;
      }
      const size_t row = all > 0 ? seen.buffer.bytes / static_cast<size_t>(all) : 0;
      add({seen.buffer.data + done * row, mine * row});
      done += mine;
    }
    return done == all;
  }

  static constexpr int kFew = 8;

  const Buffer* items() const { return size_ > kFew ? many_.data() : few_; }
  void add(Buffer buffer) {
    if (size_ == kFew) many_.assign(few_, few_ + kFew);
    if (size_ < kFew)
      few_[size_] = buffer;
    else
      many_.push_back(buffer);
    ++size_;
  }

  nb::object kept_;  // the tensors of a list
  Buffer few_[kFew];
  std::vector<Buffer> many_;  // all of them, if they are more than a few
  int size_ = 0;
};

uint64_t label_of(const Shape& shape) {
  uint64_t label = kNoSizes;
  for (int dim = 0; dim < shape.dims; ++dim) label = add_size(label, shape.sizes[dim]);
  return label;
}

/// Whether the operation only moves data, which then may lie in rows.
bool moves(Kind kind) { return !reduces(kind) && kind != Kind::kBarrier; }

bool elementwise(Kind kind) {
  return kind == Kind::kAllReduce || kind == Kind::kReduce || kind == Kind::kBroadcast;
}

}  // namespace

void learn_reductions(const nb::dict& known) {
  for (auto [object, name] : known) {
    const std::string text = nb::cast<std::string>(name);
    for (size_t i = 0; i < kReduceOps; ++i)
      if (text == kReduceOpNames[i]) names().reductions[i] = nb::borrow(object).release().ptr();
  }
}

Direct::Direct(nb::object group, nb::object journal, double timeout_, nb::object on_failure)
    : timeout(timeout_),
      group_owner_(std::move(group)),
      journal_owner_(std::move(journal)),
      group_(*nb::cast<PyGroup*>(group_owner_)),
      journal_(*nb::cast<Journal*>(journal_owner_)),
      on_failure_(std::move(on_failure)) {}

/// Run act() and turn its failures into the program's.
template <class Act>
bool Direct::guarded(uint64_t slot, nb::handle name, nb::handle inputs, nb::handle outputs,
                     nb::handle reduce_op, int root, Act&& act) {
  try {
    nb::gil_scoped_release nogil;
    act();
  } catch (const Fault& fault) {
    on_failure_(fault_args(fault), slot, name, inputs, outputs, reduce_op, root);
    throw;  // it should have raised
  } catch (const Interrupted&) {
    nb::python_error handlers;  // takes the pending exception
    on_failure_(handlers.value(), slot, name, inputs, outputs, reduce_op, root);
    throw handlers;
  }
  journal_.end(slot);
  return true;
}

bool Direct::run(nb::handle name, nb::handle inputs, nb::handle outputs, nb::handle reduce_op,
                 int root, nb::handle in_rows, nb::handle out_rows) {
  unsigned which, reduction = 0;
  if (!find(names().forms, kFormCount, name.ptr(), which)) return false;
  if (!reduce_op.is_none() && !find(names().reductions, kReduceOps, reduce_op.ptr(), reduction))
    return false;
  const Form& form = kForms[which];
  Operation operation{};
  operation.kind = form.kind;
  operation.reduce_op = static_cast<ReduceOp>(reduction);
  operation.root = root;
  operation.factor = 1;
  operation.label = kNoSizes;
  const bool at_root = root == group_.core().rank();
  const Arity expected = arity(operation.kind, at_root, group_.core().size());
  Side in, out;
  const bool strided = moves(form.kind);
  if (!in.read(inputs, form.input_list, expected.inputs, in_rows, strided)) return false;
  if (elementwise(form.kind) && inputs.ptr() == outputs.ptr())
    out = in;
  else if (!out.read(outputs, form.output_list, expected.outputs, out_rows, strided))
    return false;
  if ((in.count > 0 && out.count > 0 && in.dtype != out.dtype) || !out.apart()) return false;
  operation.dtype = in.count > 0 ? in.dtype : out.dtype;
  operation.inputs = in.view();
  operation.outputs = out.view();
  if (elementwise(operation.kind)) {
    if (expected.inputs && expected.outputs && inputs.ptr() != outputs.ptr()) return false;
    operation.label = label_of(in.count > 0 ? in.shape : out.shape);
  }
  try {
    prepare(operation, group_.core().rank(), group_.core().size());
    operation.prepared = true;
  } catch (const std::invalid_argument&) {
    return false;
  }
  const bool rooted = form.rooted;
  const Told told{form.name, operation.dtype, operation.reduce_op, rooted ? root : -1,
                  in.count,  out.count,       in.shape,            out.shape};
  guarded(journal_.begin(told), name, inputs, outputs, reduce_op, root,
          [&] { group_.core().run(operation, timeout, signal_raised); });
  const bool only_read = operation.kind == Kind::kBroadcast && at_root;
  if (expected.outputs > 0 && !only_read && !mark_written(outputs.ptr())) throw nb::python_error();
  return true;
}

int Direct::transfer(bool is_send, nb::handle tensor, int peer, int64_t tag) {
  Seen seen;
  const int lowest = is_send ? 0 : kAnyRank;
  if (peer < lowest || peer >= group_.core().size() || !see(tensor.ptr(), seen)) return -2;
  const RequestPtr request = request_of(is_send, peer, seen.buffer, seen.dtype, tag, timeout);
  const char* name = is_send ? "send" : "recv";
  Told told{name, seen.dtype};
  (is_send ? told.in_count : told.out_count) = 1;
  (is_send ? told.in : told.out) = seen.shape;
  int source = -1;
  guarded(journal_.begin(told, peer, tag), nb::str(name), tensor, tensor, nb::int_(tag), peer,
          [&] { source = group_.transfer(request); });
  return source;
}

bool Direct::send(nb::handle tensor, int dst, int64_t tag) {
  return transfer(true, tensor, dst, tag) != -2;
}

int Direct::recv(nb::handle tensor, int src, int64_t tag) {
  const int source = transfer(false, tensor, src, tag);
  if (source != -2 && !mark_written(tensor.ptr())) throw nb::python_error();
  return source;
}

}  // namespace tilework

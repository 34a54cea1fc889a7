#include "python/fast_path.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "python/provenance_digest.h"

namespace tilework {
namespace {

/// A public operation: its name, and the form in which callers pass each side.
struct OpForm {
  const char* name;
  OpKind kind;
  bool input_list = false, output_list = false, rooted = false;
};
constexpr OpForm kForms[] = {
    {"all_reduce", OpKind::kAllReduce},
    {"broadcast", OpKind::kBroadcast, false, false, true},
    {"all_gather_into_tensor", OpKind::kAllGather},
    {"reduce_scatter_tensor", OpKind::kReduceScatter},
    {"all_to_all_single", OpKind::kAllToAll},
    {"barrier", OpKind::kBarrier},
    {"all_gather", OpKind::kAllGather, false, true},
    {"reduce_scatter", OpKind::kReduceScatter, true},
    {"all_to_all", OpKind::kAllToAll, true, true},
    {"reduce", OpKind::kReduce, false, false, true},
    {"gather", OpKind::kGather, false, true, true},
    {"scatter", OpKind::kScatter, true, false, true},
};
constexpr size_t kFormCount = count_of(kForms);

/// The Python objects that name operations and reductions, compared by identity.
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

std::atomic<bool> profiled{false};

bool find(PyObject* const* table, size_t count, PyObject* object, unsigned& index) {
  for (index = 0; index < count; ++index)
    if (table[index] == object) return true;
  return false;
}

/// The tensors of one side of an operation.
class Operands {
 public:
  Operands() {}  // few_ stays as it is
  Operands(const Operands&) = delete;
  Operands& operator=(const Operands&) = delete;

  /// Read the tensors; false if the operation does not take them, or must prepare them.
  bool read(nb::handle tensors, bool as_list, int expected, nb::handle rows, bool strided) {
    if (tensors.is_none()) return expected == 0;
    if (as_list) return read_list(tensors, expected, strided);
    TensorView view;
    const bool divided = expected > 1 || !rows.is_none();
    if (expected == 0 || !view_tensor(tensors.ptr(), view, strided && !divided)) return false;
    set_first(view, 1);
    if (divided) return divide(view, expected, rows);
    add(view.buffer);
    return true;
  }

  /// True if no two tensors share memory.
  bool disjoint() const {
    const Buffer* end = items() + size_;
    const auto before = [](const Buffer& a, const Buffer& b) { return a.data < b.data; };
    const auto touch = [](const Buffer& a, const Buffer& b) { return a.data + a.span() > b.data; };
    if (std::adjacent_find(items(), end, touch) == end) return true;
    std::vector<Buffer> sorted;
    for (const Buffer* item = items(); item < end; ++item)
      if (item->bytes > 0) sorted.push_back(*item);
    std::sort(sorted.begin(), sorted.end(), before);
    // Strided tensors may interleave, so comparing neighbours does not suffice.
    for (size_t i = 0; i < sorted.size(); ++i)
      for (size_t j = i + 1; j < sorted.size() && touch(sorted[i], sorted[j]); ++j)
        if (overlap(sorted[i], sorted[j])) return false;
    return true;
  }

  /// True if every tensor has this shape.
  bool alike_as(const Shape& other) const {
    return alike_ && shape.dims == other.dims &&
           std::equal(shape.sizes, shape.sizes + shape.dims, other.sizes);
  }

  /// The object that keeps the tensors alive; `given` is the object that was read.
  nb::object kept(nb::handle given) const { return kept_.is_valid() ? kept_ : nb::borrow(given); }
  Buffers view() const { return {items(), size_}; }
  size_t bytes() const {
    size_t total = 0;
    for (int i = 0; i < size_; ++i) total += items()[i].bytes;
    return total;
  }

  DType dtype = DType::kBytes;
  Shape shape;    // of the first tensor
  int count = 0;  // of tensors

 private:
  void set_first(const TensorView& view, int tensor_count) {
    dtype = view.dtype;
    shape = view.shape;
    count = tensor_count;
  }

  bool read_list(nb::handle sequence, int expected, bool strided) {
    if (!PyList_Check(sequence.ptr()) && !PyTuple_Check(sequence.ptr())) return false;
    kept_ = nb::steal(PySequence_Tuple(sequence.ptr()));  // another thread may change the list
    if (!kept_.is_valid()) throw nb::python_error();
    const Py_ssize_t length = PyTuple_GET_SIZE(kept_.ptr());
    if (length != expected || length == 0) return false;
    PyObject** items = PySequence_Fast_ITEMS(kept_.ptr());
    for (Py_ssize_t i = 0; i < length; ++i) {
      TensorView view;
      if (!view_tensor(items[i], view, strided) || (i > 0 && view.dtype != dtype)) return false;
      if (i == 0) set_first(view, expected);
      alike_ &= alike_as(view.shape);
      add(view.buffer);
    }
    return true;
  }

  /// Split a tensor into equal parts, one for each rank.
  bool divide(const TensorView& view, int parts, nb::handle rows) {
    char* const data = view.buffer.data;
    const size_t bytes = view.buffer.bytes;
    if (!rows.is_none()) return divide_rows(view, parts, rows);
    if (bytes % (parts * kItemBytes[static_cast<size_t>(dtype)]) != 0) return false;
    for (int i = 0; i < parts; ++i) add({data + bytes / parts * i, bytes / parts});
    return true;
  }

  bool divide_rows(const TensorView& view, int parts, nb::handle rows) {
    if (!PyList_Check(rows.ptr()) || PyList_GET_SIZE(rows.ptr()) != parts || view.shape.dims == 0)
      return false;
    const int64_t all = view.shape.sizes[0];
    int64_t done = 0;
    for (int i = 0; i < parts; ++i) {
      const int64_t mine = PyLong_AsLongLong(PyList_GET_ITEM(rows.ptr(), i));
      if (mine < 0 || mine > all - done) {
        PyErr_Clear();
        return false;
      }
      const size_t row = all > 0 ? view.buffer.bytes / static_cast<size_t>(all) : 0;
      add({view.buffer.data + done * row, mine * row});
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
  union {
    Buffer few_[kFew];
  };
  std::vector<Buffer> many_;  // all of them, if more than kFew
  int size_ = 0;
  bool alike_ = true;  // so far
};

uint64_t label_of(const Shape& shape) {
  uint64_t label = kNoSizes;
  for (int dim = 0; dim < shape.dims; ++dim) label = add_size(label, shape.sizes[dim]);
  return label;
}

/// True if the operation only moves data, which then may be strided.
bool only_moves(OpKind kind) { return !reduces(kind) && kind != OpKind::kBarrier; }

/// The label of parts that ranks send each other: see compare_all_calls(). `alike`: all parts that this
/// rank knows of have the same shape.
uint64_t label_of_parts(const Shape& shape, bool alike) {
  for (int dim = 0; dim < shape.dims; ++dim)
    if (shape.sizes[dim] == 0) return 0;
  const uint64_t dims = add_size(kNoSizes, shape.dims) & kDimsLabel;
  return alike ? dims | (label_of(shape) & ~kDimsLabel) | (kDimsLabel + 1) : dims;
}

bool elementwise(OpKind kind) {
  return kind == OpKind::kAllReduce || kind == OpKind::kReduce || kind == OpKind::kBroadcast;
}

}  // namespace

void set_reduce_op_objects(const nb::dict& known) {
  for (auto [object, name] : known) {
    const std::string text = nb::cast<std::string>(name);
    for (size_t i = 0; i < kReduceOps; ++i)
      if (text == kReduceOpNames[i]) names().reductions[i] = nb::borrow(object).release().ptr();
  }
}

void set_profiled(bool now) { profiled.store(now, std::memory_order_relaxed); }

FastPath::FastPath(nb::object group, nb::object flight, double timeout_, nb::object on_failure,
                   nb::object make_work)
    : timeout(timeout_),
      group_owner_(std::move(group)),
      flight_owner_(std::move(flight)),
      group_(*nb::cast<PyGroup*>(group_owner_)),
      flight_(*nb::cast<FlightRing*>(flight_owner_)),
      on_failure_(std::move(on_failure)),
      make_work_(std::move(make_work)) {}

/// Messages up to this length, and short collectives, are copied with the GIL held: releasing the GIL
/// takes longer.
constexpr size_t kCopiedWithGil = 4096;

/// The work around an operation: a slot in the flight ring, the versions of written tensors, and the
/// GIL. A short operation keeps the GIL until it has to wait, and does the other work after it has
/// published its part. Other operations do all of this work at once.
class FastPath::ShortCall final : public Interlude {
 public:
  ShortCall(FlightRing& flight, const OpRecord& record, PyObject* written)
      : flight_(flight), record_(record), written_(written) {}
  /// Of a message.
  ShortCall(FlightRing& flight, const OpRecord& record, PyObject* written, int peer, int64_t tag)
      : flight_(flight),
        record_(record),
        written_(written),
        is_message_(true),
        peer_(peer),
        tag_(tag) {}
  ~ShortCall() {
    if (released_) PyEval_RestoreThread(released_);
  }
  ShortCall(const ShortCall&) = delete;
  ShortCall& operator=(const ShortCall&) = delete;

  void published() override {
    if (published_) return;
    published_ = true;
    slot_ = is_message_ ? flight_.begin(record_, peer_, tag_) : flight_.begin(record_);
    if (!written_ || bump_versions(written_)) return;
    nb::python_error error;  // takes the error: code that runs now must not find one
    failure_ = nb::borrow(error.value());
  }
  void waits() override {
    if (!released_) released_ = PyEval_SaveThread();
  }

  /// End the wait, and do the work that is left. Returns the slot in the flight ring.
  uint64_t come_back() {
    if (released_) PyEval_RestoreThread(released_);
    released_ = nullptr;
    published();
    return slot_;
  }
  /// Raise an error of the work around the operation.
  void check() {
    if (!failure_.is_valid()) return;
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(failure_.ptr())), failure_.ptr());
    throw nb::python_error();
  }

 private:
  FlightRing& flight_;
  const OpRecord& record_;
  PyObject* const written_;  // null: nothing
  const bool is_message_ = false;
  const int peer_ = -1;
  const int64_t tag_ = 0;
  nb::object failure_;
  PyThreadState* released_ = nullptr;
  uint64_t slot_ = 0;
  bool published_ = false;
};

/// Hand the failures of act() to fail(why, slot()), which raises.
template <class Act, class Slot, class Fail>
void FastPath::run_recorded(Act&& act, Slot&& slot, Fail&& fail) {
  try {
    act();
  } catch (const Fault& fault) {
    const uint64_t at = slot();  // with it comes the GIL
    fail(fault_args(fault), at);
    throw;  // it should have raised
  } catch (const Interrupted&) {
    const uint64_t at = slot();
    nb::python_error handlers;  // takes the pending exception
    fail(handlers.value(), at);
    throw handlers;
  }
  flight_.end(slot());
}

int find_form(const std::string& name) {
  for (size_t i = 0; i < kFormCount; ++i)
    if (name == kForms[i].name) return static_cast<int>(i);
  return -1;
}

bool FastPath::run(nb::handle name, nb::handle inputs, nb::handle outputs, nb::handle reduce_op,
                   int root, nb::handle in_rows, nb::handle out_rows) {
  unsigned which;
  return find(names().forms, kFormCount, name.ptr(), which) &&
         run_form(which, name, inputs, outputs, reduce_op, root, in_rows, out_rows);
}

bool FastPath::run_form(unsigned which, nb::handle name, nb::handle inputs, nb::handle outputs,
                        nb::handle reduce_op, int root, nb::handle in_rows, nb::handle out_rows) {
  nb::object none;
  return execute(which, name, inputs, outputs, reduce_op, root, in_rows, out_rows, false, none);
}

nb::object FastPath::post(nb::handle name, nb::handle inputs, nb::handle outputs,
                          nb::handle reduce_op, int root, nb::handle in_rows, nb::handle out_rows) {
  unsigned which;
  if (!find(names().forms, kFormCount, name.ptr(), which)) return nb::object();
  return post_form(which, name, inputs, outputs, reduce_op, root, in_rows, out_rows);
}

nb::object FastPath::post_form(unsigned which, nb::handle name, nb::handle inputs,
                               nb::handle outputs, nb::handle reduce_op, int root,
                               nb::handle in_rows, nb::handle out_rows) {
  nb::object work;
  execute(which, name, inputs, outputs, reduce_op, root, in_rows, out_rows, true, work);
  return work;
}

bool FastPath::execute(unsigned which, nb::handle name, nb::handle inputs, nb::handle outputs,
                       nb::handle reduce_op, int root, nb::handle in_rows, nb::handle out_rows,
                       bool posts, nb::object& work) {
  unsigned reduction = 0;
  if (profiled.load(std::memory_order_relaxed)) return false;
  if (!reduce_op.is_none() && !find(names().reductions, kReduceOps, reduce_op.ptr(), reduction))
    return false;
  const OpForm& form = kForms[which];
  Operation operation{};
  operation.kind = form.kind;
  operation.reduce_op = static_cast<ReduceOp>(reduction);
  operation.root = root;
  operation.factor = 1;
  operation.label = kNoSizes;
  operation.provenance = thread_provenance();
  const bool at_root = root == group_.core().rank();
  const Arity expected = arity(operation.kind, at_root, group_.core().size());
  Operands in, others;
  const bool strided = only_moves(form.kind) && !posts;  // asynchronous results may need a copy
  if (!in.read(inputs, form.input_list, expected.inputs, in_rows, strided)) return false;
  const bool in_place = elementwise(form.kind) && inputs.ptr() == outputs.ptr();
  if (!in_place && !others.read(outputs, form.output_list, expected.outputs, out_rows, strided))
    return false;
  const Operands& out = in_place ? in : others;
  if ((in.count > 0 && out.count > 0 && in.dtype != out.dtype) || !out.disjoint()) return false;
  if (form.kind == OpKind::kAllToAll && !form.input_list) {
    const int64_t size = group_.core().size();
    if (in_rows.is_none() && in.shape.dims > 0 && in.shape.sizes[0] % size != 0) return false;
    if (out_rows.is_none() && out.shape.dims > 0 && out.shape.sizes[0] % size != 0) return false;
  }
  operation.dtype = in.count > 0 ? in.dtype : out.dtype;
  operation.inputs = in.view();
  operation.outputs = out.view();
  if (elementwise(operation.kind)) {
    if (expected.inputs && expected.outputs && inputs.ptr() != outputs.ptr()) return false;
    operation.label = label_of(in.count > 0 ? in.shape : out.shape);
  } else if (form.kind == OpKind::kScatter || form.kind == OpKind::kReduceScatter) {
    const bool single = !form.input_list || in.count == 0;
    operation.label = label_of_parts(out.shape, single || in.alike_as(out.shape));
  } else if (form.kind != OpKind::kBarrier &&
             !(form.kind == OpKind::kAllToAll && form.input_list)) {
    const bool single = !form.output_list || out.count == 0;
    const bool even = in_rows.is_none() && out_rows.is_none();
    operation.label = label_of_parts(in.shape, single ? even : out.alike_as(in.shape));
  }
  try {
    validate(operation, group_.core().rank(), group_.core().size());
    operation.validated = true;
  } catch (const std::invalid_argument&) {
    return false;
  }
  const bool rooted = form.rooted;
  const OpRecord record{form.name,          operation.dtype, operation.reduce_op,
                        rooted ? root : -1, in.count,        out.count,
                        in.shape,           out.shape};
  const bool only_read = operation.kind == OpKind::kBroadcast && at_root;
  PyObject* const written = expected.outputs > 0 && !only_read ? outputs.ptr() : nullptr;
  if (posts) {
    auto kept = std::make_unique<PostedCall::Kept>(in.kept(inputs), out.kept(outputs),
                                                   written ? operation.outputs : Buffers{});
    ShortCall call(flight_, record, nullptr);
    work = start(call, false, std::move(kept), name, reduce_op, root,
                 [&] { return group_.core().submit(operation, timeout); });
    return true;
  }
  ShortCall call(flight_, record, written);
  const bool is_short = in.bytes() + out.bytes() <= kShortBytes / group_.core().size();
  run_recorded(
      [&] {
        if (!is_short) call.published(), call.waits();
        group_.core().run(operation, timeout, signal_raised, is_short ? &call : nullptr);
      },
      [&] { return call.come_back(); },
      [&](nb::handle why, uint64_t slot) {
        on_failure_(why, slot, name, inputs, outputs, reduce_op, root);
      });
  call.check();
  return true;
}

/// Start an asynchronous operation; return its Work.
template <class Start>
nb::object FastPath::start(ShortCall& call, bool is_message, std::unique_ptr<PostedCall::Kept> kept,
                           nb::handle name, nb::handle reduce_op, int root, Start&& start) {
  const nb::object inputs = kept->inputs, outputs = kept->outputs;
  std::shared_ptr<Completion> completion;
  call.published();
  try {
    call.waits();
    completion = start();
  } catch (const Fault& fault) {
    const uint64_t slot = call.come_back();  // with it comes the GIL
    on_failure_(fault_args(fault), slot, name, inputs, outputs, reduce_op, root);
    throw;  // it should have raised
  } catch (const std::exception& error) {
    flight_.end(call.come_back(), nb::str(error.what()));
    throw;
  }
  const uint64_t slot = call.come_back();
  PyCompletion handle = {std::move(completion), group_.reference(), is_message};
  const nb::object posted =
      nb::cast(new PostedCall(std::move(handle), std::move(kept), flight_owner_, slot),
               nb::rv_policy::take_ownership);
  return make_work_(posted, name, inputs, outputs, reduce_op, root);
}

/// A message as it is sent or received, and recorded.
struct FastPath::Message {
  bool is_send;
  int peer;
  int64_t tag;
  TensorView view;
  uint64_t label;
  OpRecord record;

  bool is_short() const { return view.buffer.bytes <= kCopiedWithGil && peer >= 0; }
  RequestPtr request(double timeout) const {
    return request_of(is_send, peer, view.buffer, view.dtype, tag, timeout, label);
  }
};

/// False: refused.
bool FastPath::read_message(bool is_send, nb::handle tensor, int peer, int64_t tag,
                            Message& message) {
  const int lowest = is_send ? 0 : kAnyRank;
  if (peer < lowest || peer >= group_.core().size() || profiled.load(std::memory_order_relaxed))
    return false;
  message.is_send = is_send;
  message.peer = peer;
  message.tag = tag;
  if (!view_tensor(tensor.ptr(), message.view)) return false;
  message.label = label_of(message.view.shape);
  message.record = {is_send ? "send" : "recv", message.view.dtype};
  (is_send ? message.record.in_count : message.record.out_count) = 1;
  (is_send ? message.record.in : message.record.out) = message.view.shape;
  return true;
}

/// Transfer a short message without a wait; false: nothing was done.
bool FastPath::transfer_now(const Message& message, ShortCall& call) {
  if (!message.is_short()) return false;
  const auto& [buffer, dtype, shape] = message.view;
  Group& core = group_.core();
  try {
    if (!(message.is_send
              ? core.send_now(message.peer, buffer, dtype, message.tag, message.label)
              : core.receive_now(message.peer, buffer, dtype, message.tag, message.label)))
      return false;
  } catch (const Fault&) {  // the general path raises it
    return false;
  }
  flight_.end(call.come_back());
  call.check();
  return true;
}

int FastPath::transfer(bool is_send, nb::handle tensor, int peer, int64_t tag) {
  Message message;
  if (!read_message(is_send, tensor, peer, tag, message)) return -2;
  ShortCall call(flight_, message.record, is_send ? nullptr : tensor.ptr(), peer, tag);
  if (transfer_now(message, call)) return peer;
  int source = peer;
  call.published();
  run_recorded(
      [&] {
        if (!message.is_short()) call.waits();
        const bool soon = !is_send && peer >= 0 &&
                          group_.core().receive_soon(peer, message.view.buffer, message.view.dtype,
                                                     tag, message.label, call);
        if (soon) return;
        call.waits();
        source = group_.transfer(message.request(timeout));
      },
      [&] { return call.come_back(); },
      [&](nb::handle why, uint64_t slot) {
        on_failure_(why, slot, nb::str(message.record.name), tensor, tensor, nb::int_(tag), peer);
      });
  call.check();
  return source;
}

nb::object FastPath::post_message(bool is_send, nb::handle tensor, int peer, int64_t tag) {
  Message message;
  if (!read_message(is_send, tensor, peer, tag, message)) return nb::object();
  const nb::object sides[] = {is_send ? nb::borrow(tensor) : nb::none(),
                              is_send ? nb::none() : nb::borrow(tensor)};
  const nb::str name(message.record.name);
  const nb::int_ number(tag);
  {
    ShortCall call(flight_, message.record, is_send ? nullptr : tensor.ptr(), peer, tag);
    if (transfer_now(message, call))
      return make_work_(nb::none(), name, sides[0], sides[1], number, peer);
  }
  auto kept = std::make_unique<PostedCall::Kept>(
      sides[0], sides[1], is_send ? Buffers{} : Buffers{&message.view.buffer, 1});
  ShortCall call(flight_, message.record, nullptr, peer, tag);
  return start(call, true, std::move(kept), name, number, peer, [&] {
    const RequestPtr request = message.request(timeout);
    group_.core().post(request, false);
    return request->completion;
  });
}

bool FastPath::send(nb::handle tensor, int dst, int64_t tag) {
  return transfer(true, tensor, dst, tag) != -2;
}

int FastPath::recv(nb::handle tensor, int src, int64_t tag) {
  return transfer(false, tensor, src, tag);
}

nb::object FastPath::isend(nb::handle tensor, int dst, int64_t tag) {
  return post_message(true, tensor, dst, tag);
}

nb::object FastPath::irecv(nb::handle tensor, int src, int64_t tag) {
  return post_message(false, tensor, src, tag);
}

}  // namespace tilework

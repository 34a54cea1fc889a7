#include "python/py_group.h"

#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <stdexcept>

#include "python/provenance_digest.h"

namespace tilework {
namespace {

template <class Enum>
Enum checked(int value, size_t count, const char* what) {
  if (value < 0 || static_cast<size_t>(value) >= count)
    throw std::invalid_argument(std::string(what) + ": " + std::to_string(value) + " is unknown");
  return static_cast<Enum>(value);
}

Buffer buffer_of(uint64_t address, int64_t bytes) {
  if (bytes < 0) throw std::invalid_argument("negative size: " + std::to_string(bytes));
  return {reinterpret_cast<char*>(address), static_cast<size_t>(bytes)};
}

std::vector<Buffer> buffers_of(const nb::sequence& pairs) {
  std::vector<Buffer> buffers;
  for (nb::handle pair : pairs) {
    auto [address, bytes] = nb::cast<std::tuple<uint64_t, int64_t>>(pair);
    buffers.push_back(buffer_of(address, bytes));
  }
  return buffers;
}

Buffers view(const std::vector<Buffer>& buffers) {
  return {buffers.data(), static_cast<int>(buffers.size())};
}

/// Any 64 bits, signed or not.
uint64_t number_of(const nb::int_& label) { return PyLong_AsUnsignedLongLongMask(label.ptr()); }

Operation operation_of(int kind, int dtype, int reduce_op, int root, double factor,
                       const nb::int_& label) {
  Operation operation{};
  operation.kind = checked<OpKind>(kind, kKinds, "kind");
  operation.dtype = checked<DType>(dtype, kDTypes, "dtype");
  operation.reduce_op = checked<ReduceOp>(reduce_op, kReduceOps, "reduce_op");
  operation.root = root;
  operation.factor = factor;
  operation.label = number_of(label);
  operation.provenance = thread_provenance();
  return operation;
}

}  // namespace

RequestPtr request_of(bool is_send, int peer, Buffer buffer, DType dtype, int64_t tag,
                      double timeout, uint64_t label) {
  auto request = std::make_shared<Request>();
  request->is_send = is_send;
  request->peer = peer;
  request->buffer = buffer;
  request->dtype = dtype;
  request->tag = tag;
  request->label = label;
  request->seconds = timeout;
  request->deadline = deadline_after(timeout);
  return request;
}

bool PyCompletion::poll() const {
  if (completion->done()) return true;
  nb::gil_scoped_release nogil;
  return group->poll(*completion, is_message);
}

void PyCompletion::when_done(nb::callable fn) const {
  completion->when_done(callback_of(std::move(fn)));
  if (completion->done()) return;
  nb::gil_scoped_release nogil;
  group->expect_nobody_waits(is_message);
}

bool PyCompletion::wait(double timeout) const {
  if (!wait_for_end(timeout)) return false;
  if (auto fault = completion->fault()) throw *fault;
  return true;
}

bool PyCompletion::wait_for_end(double timeout) const {
  completion->note_wait();
  nb::gil_scoped_release nogil;
  return group->wait(*completion, is_message, timeout, signal_raised);
}

nb::object PyCompletion::fault() const {
  auto fault = completion->fault();
  return fault ? nb::object(fault_args(*fault)) : nb::none();
}

PyGroup::PyGroup(int fd, int rank, int size, const nb::bytes& nonce, bool of_threads)
    : PyGroup(Group::make(fd, rank, size, {nonce.c_str(), nonce.size()}, of_threads)) {}

PyGroup::PyGroup(std::shared_ptr<Group> group) : group_(std::move(group)) { close_at_exit(group_); }

PyGroup::~PyGroup() {
  if (group_->in_forked_child()) {
    new std::shared_ptr<Group>(std::move(group_));
    return;
  }
  nb::gil_scoped_release nogil;
  group_->close();
  group_.reset();
}

void PyGroup::run(int kind, int dtype, int reduce_op, int root, double factor,
                  const nb::sequence& inputs, const nb::sequence& outputs, const nb::int_& label,
                  double timeout) {
  Operation operation = operation_of(kind, dtype, reduce_op, root, factor, label);
  const auto in = buffers_of(inputs), out = buffers_of(outputs);
  operation.inputs = view(in);
  operation.outputs = view(out);
  nb::gil_scoped_release nogil;
  group_->run(operation, timeout, signal_raised);
}

PyCompletion PyGroup::submit(int kind, int dtype, int reduce_op, int root, double factor,
                             const nb::sequence& inputs, const nb::sequence& outputs,
                             const nb::int_& label, double timeout) {
  Operation operation = operation_of(kind, dtype, reduce_op, root, factor, label);
  const auto in = buffers_of(inputs), out = buffers_of(outputs);
  operation.inputs = view(in);
  operation.outputs = view(out);
  nb::gil_scoped_release nogil;
  return {group_->submit(operation, timeout), GroupRef(group_), false};
}

PyCompletion PyGroup::isend(int dst, uint64_t address, int64_t nbytes, int dtype, int64_t tag,
                            double timeout, const nb::int_& label) {
  return post(request_of(true, dst, buffer_of(address, nbytes),
                         checked<DType>(dtype, kDTypes, "dtype"), tag, timeout, number_of(label)));
}

PyCompletion PyGroup::irecv(int src, uint64_t address, int64_t nbytes, int dtype, int64_t tag,
                            double timeout, const nb::int_& label) {
  return post(request_of(false, src, buffer_of(address, nbytes),
                         checked<DType>(dtype, kDTypes, "dtype"), tag, timeout, number_of(label)));
}

PyCompletion PyGroup::post(const RequestPtr& request) {
  nb::gil_scoped_release nogil;
  group_->post(request, false);
  return {request->completion, GroupRef(group_), true};
}

int PyGroup::transfer(const RequestPtr& request) {
  group_->post(request, true);
  try {
    group_->wait(*request->completion, true, -1, signal_raised);
  } catch (const Interrupted&) {
    group_->cancel(request);  // the caller may free the buffer
    throw;
  }
  if (auto fault = request->completion->fault()) throw *fault;
  return request->completion->source();
}

nb::list PyGroup::headers() {
  nb::list result;
  for (const auto& [call, pid] : group_->calls()) {
    const bool none = call.sequence == 0;
    result.append(nb::make_tuple(
        call.sequence, none ? "" : kind_name(call.kind()), none ? "" : dtype_name(call.dtype()),
        none ? "" : reduce_op_name(call.reduce_op()), call.root(), call.bytes, pid));
  }
  return result;
}

void PyGroup::report_failure(const nb::str& text) {
  Py_ssize_t length = 0;
  const char* utf8 = PyUnicode_AsUTF8AndSize(text.ptr(), &length);
  if (utf8 == nullptr) throw nb::python_error();
  while (length > static_cast<Py_ssize_t>(kMaxReportBytes) ||
         (length > 0 && (utf8[length] & 0xc0) == 0x80))
    --length;  // never half a character
  group_->report_failure(std::string(utf8, static_cast<size_t>(length)));
}

nb::list PyGroup::failure_reports(double timeout) {
  std::vector<std::optional<std::string>> report;
  {
    nb::gil_scoped_release nogil;
    report = group_->failure_reports(timeout, signal_raised);
  }
  nb::list result;
  for (const auto& text : report) result.append(text ? text_of(*text) : nb::none());
  return result;
}

nb::object PyGroup::aborted() {
  auto abort = group_->aborted();
  if (!abort) return nb::none();
  return nb::make_tuple(abort->rank, text_of(abort->kind), text_of(abort->text));
}

void PyGroup::close() {
  if (group_->in_forked_child()) return;
  nb::gil_scoped_release nogil;
  group_->close();
}

nb::dict PyGroup::statistics() {
  const Statistics figures = group_->statistics();
  nb::dict result;
  result["operations"] = figures.operations;
  result["bytes"] = figures.bytes;
  result["sleeps"] = figures.sleeps;
  result["segment_bytes"] = figures.segment_bytes;
  result["read_bytes"] = figures.read_bytes;
  return result;
}

}  // namespace tilework

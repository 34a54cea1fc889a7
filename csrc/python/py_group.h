// A group and its completions as Python objects. The contract is src/tilework/_core.pyi.
#pragma once

#include "python/interpreter.h"

namespace tilework {

struct PyCompletion {
  std::shared_ptr<Completion> completion;
  GroupRef group;
  bool is_message;

  bool poll() const;
  bool wait(double timeout) const;
  /// The same, but a failure is an end, too.
  bool wait_for_end(double timeout) const;
  void when_done(nb::callable fn) const;
  nb::object fault() const;
};

class PyGroup {
 public:
  PyGroup(int fd, int rank, int size, const nb::bytes& nonce, bool of_threads);
  explicit PyGroup(std::shared_ptr<Group> group);
  PyGroup(const PyGroup&) = delete;
  PyGroup& operator=(const PyGroup&) = delete;
  ~PyGroup();

  void run(int kind, int dtype, int reduce_op, int root, double factor, const nb::sequence& inputs,
           const nb::sequence& outputs, const nb::int_& label, double timeout);
  PyCompletion submit(int kind, int dtype, int reduce_op, int root, double factor,
                      const nb::sequence& inputs, const nb::sequence& outputs,
                      const nb::int_& label, double timeout);
  PyCompletion isend(int dst, uint64_t address, int64_t nbytes, int dtype, int64_t tag,
                     double timeout, const nb::int_& label);
  PyCompletion irecv(int src, uint64_t address, int64_t nbytes, int dtype, int64_t tag,
                     double timeout, const nb::int_& label);

  /// isend or irecv and wait, without waking a thread of the core; returns the source. Not
  /// with the GIL.
  int transfer(const RequestPtr& request);

  PyGroup* beside(int rank) const { return new PyGroup(group_->beside(rank)); }
  nb::list headers();
  void report_failure(const nb::str& text);
  nb::list failure_reports(double timeout);
  void abort(const std::string& kind, const std::string& text) { group_->abort(kind, text); }
  nb::object aborted();
  void close();
  nb::dict statistics();

  Group& core() const { return *group_; }
  GroupRef reference() const { return GroupRef(group_); }

 private:
  PyCompletion post(const RequestPtr& request);

  std::shared_ptr<Group> group_;
};

RequestPtr request_of(bool is_send, int peer, Buffer buffer, DType dtype, int64_t tag,
                      double timeout, uint64_t label);

}  // namespace tilework

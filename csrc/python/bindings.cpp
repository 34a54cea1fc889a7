// tilework._core for Python: the module. Arguments are converted in py_group.cpp and fast_path.cpp, and
// the GIL is released around everything that may wait or copy; faults become exceptions. The
// contract is src/tilework/_core.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <type_traits>

#include "collectives/calibration.h"
#include "files/crc32.h"
#include "files/file_reader.h"
#include "kernels/random.h"
#include "python/fast_function.h"
#include "python/fast_path.h"
#include "python/memory_hold.h"
#include "python/operator_call.h"
#include "python/provenance_digest.h"
#include "transport/copy.h"

using namespace nanobind::literals;

namespace tilework {
namespace {

nb::dict names_of(const char* const* names, size_t count) {
  nb::dict result;
  for (size_t i = 0; i < count; ++i) result[names[i]] = i;
  return result;
}

/// `payload` is the Python class.
void translate_fault(const std::exception_ptr& exception, void* payload) {
  try {
    std::rethrow_exception(exception);
  } catch (const Fault& fault) {
    PyErr_SetObject(static_cast<PyObject*>(payload), fault_args(fault).ptr());
  } catch (const Interrupted&) {
    // signal_raised() left the handler's exception pending
  } catch (const std::system_error& error) {
    errno = error.code().value();
    nb::object args = nb::make_tuple(error.code().value(), error.what());
    PyErr_SetObject(PyExc_OSError, args.ptr());
  }
}

/// The default tunables, but for those given by name.
Tunables tunables_of(const nb::dict& given) {
  Tunables tunables;
  for (auto [name, value] : given) {
    const std::string wanted = nb::cast<std::string>(name);
    const auto* end = kTunableFields + count_of(kTunableFields);
    const auto* field = std::find_if(kTunableFields, end,
                                     [&](const TunableField& one) { return wanted == one.name; });
    if (field == end) throw std::invalid_argument("tunables: there is no " + wanted);
    field->of(tunables) = nb::cast<uint64_t>(value);
  }
  return tunables;
}

nb::dict dict_of(Tunables tunables) {
  nb::dict result;
  for (const TunableField& field : kTunableFields) result[field.name] = field.of(tunables);
  return result;
}

void bind_group(nb::module_& m) {
  nb::class_<PyGroup>(m, "Group")
      .def(nb::init<int, int, int, const nb::bytes&, bool>(), "fd"_a, "rank"_a, "size"_a, "nonce"_a,
           "of_threads"_a = false)
      .def("beside", &PyGroup::beside, "rank"_a)
      .def("run", &PyGroup::run, "kind"_a, "dtype"_a, "reduce_op"_a, "root"_a, "factor"_a,
           "inputs"_a, "outputs"_a, "label"_a, "timeout"_a)
      .def("submit", &PyGroup::submit, "kind"_a, "dtype"_a, "reduce_op"_a, "root"_a, "factor"_a,
           "inputs"_a, "outputs"_a, "label"_a, "timeout"_a)
      .def("isend", &PyGroup::isend, "dst"_a, "address"_a, "nbytes"_a, "dtype"_a, "tag"_a,
           "timeout"_a, "label"_a = 0)
      .def("irecv", &PyGroup::irecv, "src"_a, "address"_a, "nbytes"_a, "dtype"_a, "tag"_a,
           "timeout"_a, "label"_a = 0)
      .def("headers", &PyGroup::headers)
      .def("lost_ranks", [](const PyGroup& self) { return self.core().lost_ranks(); })
      .def("blocked_ranks", [](const PyGroup& self) { return self.core().blocked_ranks(); })
      .def("last_wait", [](const PyGroup& self) { return self.core().last_wait(); })
      .def("cores", [](const PyGroup& self) { return self.core().cores(); })
      .def("sequence", [](const PyGroup& self) { return self.core().sequence(); })
      .def("report_failure", &PyGroup::report_failure, "text"_a)
      .def("failure_reports", &PyGroup::failure_reports, "timeout"_a)
      .def("abort", &PyGroup::abort, "kind"_a, "text"_a)
      .def("aborted", &PyGroup::aborted)
      .def("arena", [](const PyGroup& self) { return self.core().arena(); })
      .def("close", &PyGroup::close)
      .def("single_copy", [](const PyGroup& self) { return self.core().single_copy(); })
      .def("tunables", [](const PyGroup& self) { return dict_of(self.core().tunables()); })
      .def("statistics", &PyGroup::statistics);
}

/// What `act` returns, its exceptions as Python's.
template <class Act>
PyObject* guarded(Act&& act) {
  try {
    return act();
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

PyObject* or_none(nb::object object) {
  return object.is_valid() ? object.release().ptr() : Py_NewRef(Py_None);
}

/// FastPath.run and post as plain C functions: nanobind's conversion of the arguments takes as long as
/// the rest of the call into the core.
template <class Act>
PyObject* fast_path_collective(PyObject* const* args, Py_ssize_t count, Act&& act) {
  PyObject* arguments[] = {nullptr, Py_None, Py_None, Py_None, nullptr, Py_None, Py_None};
  if (count < 1 || count > static_cast<Py_ssize_t>(count_of(arguments))) {
    PyErr_Format(PyExc_TypeError, "1 to 7 arguments are taken, not %zd", count);
    return nullptr;
  }
  std::copy(args, args + count, arguments);
  const long root = arguments[4] ? PyLong_AsLong(arguments[4]) : 0;
  if (root == -1 && PyErr_Occurred()) return nullptr;
  return guarded([&] { return act(arguments, static_cast<int>(root)); });
}

PyObject* fast_path_run(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return fast_path_collective(args, count, [&](PyObject* const* a, int root) {
    FastPath& fast_path = *nb::inst_ptr<FastPath>(self);
    return PyBool_FromLong(fast_path.run(a[0], a[1], a[2], a[3], root, a[5], a[6]));
  });
}

PyObject* fast_path_post(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return fast_path_collective(args, count, [&](PyObject* const* a, int root) {
    FastPath& fast_path = *nb::inst_ptr<FastPath>(self);
    return or_none(fast_path.post(a[0], a[1], a[2], a[3], root, a[5], a[6]));
  });
}

/// Those of messages, likewise.
template <auto act>
PyObject* fast_path_message(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  if (count != 3) {
    PyErr_Format(PyExc_TypeError, "a tensor, a rank and a tag are needed, %zd arguments", count);
    return nullptr;
  }
  const long peer = PyLong_AsLong(args[1]);
  const long long tag = PyLong_AsLongLong(args[2]);
  if (PyErr_Occurred()) return nullptr;
  return guarded([&] {
    FastPath& fast_path = *nb::inst_ptr<FastPath>(self);
    auto result = (fast_path.*act)(args[0], static_cast<int>(peer), tag);
    if constexpr (std::is_same_v<decltype(result), bool>)
      return PyBool_FromLong(result);
    else if constexpr (std::is_same_v<decltype(result), int>)
      return PyLong_FromLong(result);
    else
      return or_none(std::move(result));
  });
}

PyCFunction fast_call(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

void bind_fast_path(nb::module_& m) {
  const auto message = [](const char* name, auto function) {
    return PyMethodDef{name, fast_call(function), METH_FASTCALL, nullptr};
  };
  static PyMethodDef methods[] = {{"run", fast_call(fast_path_run), METH_FASTCALL, nullptr},
                                  {"post", fast_call(fast_path_post), METH_FASTCALL, nullptr},
                                  message("send", fast_path_message<&FastPath::send>),
                                  message("recv", fast_path_message<&FastPath::recv>),
                                  message("isend", fast_path_message<&FastPath::isend>),
                                  message("irecv", fast_path_message<&FastPath::irecv>)};
  nb::class_<FastPath> fast_path(m, "FastPath");
  for (PyMethodDef& method : methods)
    fast_path.attr(method.ml_name) =
        nb::steal(PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(fast_path.ptr()), &method));
  fast_path
      .def(nb::init<nb::object, nb::object, double, nb::object, nb::object>(), "group"_a,
           "flight"_a, "timeout"_a, "on_failure"_a, "make_work"_a)
      .def_rw("timeout", &FastPath::timeout);
  m.def("fast_function", &make_fast_function, "function"_a, "inputs"_a, "outputs"_a);
  m.def("register_world", &set_world_types, "variable"_a, "world_type"_a, "group_type"_a);
}

void bind_flight_ring(nb::module_& m) {
  nb::class_<FlightRing>(m, "FlightRing")
      .def(nb::init<size_t>(), "capacity"_a)
      .def(
          "begin",
          [](FlightRing& self, nb::object what, nb::object peer, nb::object tag, nb::handle) {
            return self.begin(std::move(what), std::move(peer), std::move(tag));
          },
          "what"_a, "peer"_a.none() = nb::none(), "tag"_a = 0, "depth"_a = 1)
      .def(
          "end",
          [](FlightRing& self, uint64_t slot, nb::object failure) {
            self.end(slot, std::move(failure));
          },
          "slot"_a, "failure"_a = "")
      .def(
          "follow",
          [](FlightRing& self, uint64_t slot, nb::object pending) {
            self.follow(slot, std::move(pending));
          },
          "slot"_a, "pending"_a)
      .def("records", &FlightRing::records)
      .def("since", &FlightRing::since, "first"_a, "also"_a)
      .def("grow", &FlightRing::grow, "capacity"_a);
}

void bind_arena(nb::module_& m) {
  nb::class_<Arena>(m, "Arena")
      .def(
          "allocate",
          [](Arena& self, size_t bytes) {
            return reinterpret_cast<uint64_t>(self.allocate(bytes));
          },
          "bytes"_a)
      .def(
          "release",
          [](Arena& self, uint64_t address) { self.release(reinterpret_cast<char*>(address)); },
          "address"_a)
      .def("used_bytes", &Arena::used_bytes);
}

/// For tests: the clock is the caller's.
void bind_wait_history(nb::module_& m) {
  m.def("worked_within", &worked_within, "from_"_a, "to"_a, "works_since"_a, "waits_since"_a);
  nb::class_<WaitHistory>(m, "WaitHistory")
      .def(nb::init<>())
      .def(
          "pace",
          [](const WaitHistory& self, int threads, int cores) {
            const Pace pace = self.pace(pace_for(threads, cores));
            return nb::make_tuple(pace.spin_ns, pace.short_ns, pace.awake_ns, pace.crowded);
          },
          "threads"_a, "cores"_a)
      .def(
          "record",
          [](WaitHistory& self, int64_t waited_ns, int threads, int cores) {
            self.record(waited_ns, pace_for(threads, cores));
          },
          "waited_ns"_a, "threads"_a, "cores"_a)
      .def("avoids_yields", &WaitHistory::avoids_yields, "now"_a)
      .def("record_yield", &WaitHistory::record_yield, "now"_a, "ns"_a)
      .def("record_yields", &WaitHistory::record_yields, "now"_a, "in_vain"_a)
      .def("should_look", &WaitHistory::should_look)
      .def("should_move", &WaitHistory::should_move, "now"_a);
}

void bind_completion(nb::module_& m) {
  nb::class_<PyCompletion>(m, "Completion")
      .def("done", [](const PyCompletion& self) { return self.completion->done(); })
      .def("poll", &PyCompletion::poll)
      .def("wait", &PyCompletion::wait, "timeout"_a)
      .def("fault", &PyCompletion::fault)
      .def("add_done_callback", &PyCompletion::when_done, "fn"_a)
      .def("source", [](const PyCompletion& self) { return self.completion->source(); });
}

void bind_posted_call(nb::module_& m) {
  nb::class_<PostedCall>(m, "PostedCall")
      .def_prop_ro("completion", &PostedCall::completion, nb::rv_policy::reference_internal)
      .def_prop_ro("slot", &PostedCall::slot)
      .def("site", &PostedCall::site)
      .def("what", &PostedCall::what)
      .def("finish", &PostedCall::finish, "blocks"_a)
      .def("let_go", &PostedCall::let_go);
}

/// Integers are taken modulo 2^64.
uint64_t wrapped(nb::handle number) {
  const uint64_t value = PyLong_AsUnsignedLongLongMask(number.ptr());
  if (PyErr_Occurred()) throw nb::python_error();
  return value;
}

SampleParams params_of(Distribution distribution, nb::handle seed, nb::handle stream, nb::handle a,
                       nb::handle b) {
  SampleParams params = {wrapped(seed), wrapped(stream), 0, 0, 0, 1};
  if (distribution == Distribution::kIntegers) {
    params.low = wrapped(a);
    params.span = wrapped(b) - params.low;
  } else {
    params.a = nb::cast<double>(a);
    params.b = nb::cast<double>(b);
  }
  return params;
}

/// Plain C functions, as fast_path_run: they are on the path of every operation of a DTensor that
/// communicates.
PyObject* set_provenance(PyObject*, PyObject* digest) {
  const uint64_t value = PyLong_AsUnsignedLongLongMask(digest);
  if (value == ~uint64_t{0} && PyErr_Occurred()) return nullptr;
  const uint64_t before = thread_provenance();
  thread_provenance() = value;
  return PyLong_FromUnsignedLongLong(before);
}

PyObject* provenance(PyObject*, PyObject*) {
  return PyLong_FromUnsignedLongLong(thread_provenance());
}

void bind_provenance(nb::module_& m) {
  static PyMethodDef functions[] = {{"set_provenance", set_provenance, METH_O, nullptr},
                                    {"provenance", provenance, METH_NOARGS, nullptr}};
  for (PyMethodDef& function : functions)
    m.attr(function.ml_name) = nb::steal(PyCFunction_New(&function, nullptr));
  m.def(
      "hash_content",
      [](uint64_t address, size_t bytes) {
        return hash_content(reinterpret_cast<const char*>(address), bytes);
      },
      "address"_a, "bytes"_a);
  m.def(
      "hash_samples",
      [](uint64_t address, const std::vector<int64_t>& shape, const std::vector<int64_t>& strides,
         size_t item_bytes, size_t samples) {
        if (samples < 2 || strides.size() != shape.size())
          throw std::invalid_argument("samples: two at least, of a tensor with as many strides");
        for (int64_t size : shape)
          if (size < 1) throw std::invalid_argument("samples of an empty tensor");
        return hash_samples(reinterpret_cast<const char*>(address), shape, strides, item_bytes,
                            samples);
      },
      "address"_a, "shape"_a, "strides"_a, "item_bytes"_a, "samples"_a);
}

/// As fast_path_run: these are on the path of every operator on DTensors.
PyObject* operator_call(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  if (count != 3) {
    PyErr_Format(PyExc_TypeError, "an operator's call has 3 arguments, not %zd", count);
    return nullptr;
  }
  return guarded([&] {
    return nb::inst_ptr<OperatorCall>(self)->run(args[0], args[1], args[2]).release().ptr();
  });
}

/// `self` is a tuple: the handlers, and the function to call where none handles the call.
PyObject* torch_function_call(PyObject* self, PyObject* const* args, Py_ssize_t count,
                              PyObject* keywords) {
  PyObject *const handlers = PyTuple_GET_ITEM(self, 0), *const otherwise =
                                                            PyTuple_GET_ITEM(self, 1);
  return guarded(
      [&] { return torch_function(handlers, otherwise, args, count, keywords).release().ptr(); });
}

void bind_operator_call(nb::module_& m) {
  static PyMethodDef call = {"operator_call", fast_call(operator_call), METH_FASTCALL, nullptr};
  static PyMethodDef intercept = {
      "torch_function",
      reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(torch_function_call)),
      METH_FASTCALL | METH_KEYWORDS, nullptr};
  nb::class_<OperatorCall>(m, "OperatorCall");
  m.def(
      "operator_call",
      [](const nb::object& python, bool values_matter) {
        const nb::object self =
            nb::cast(new OperatorCall(python, values_matter), nb::rv_policy::take_ownership);
        return nb::steal(PyCFunction_New(&call, self.ptr()));
      },
      "python"_a, "values_matter"_a);
  m.def(
      "torch_function",
      [](nb::handle handlers, nb::handle otherwise) {
        return nb::steal(PyCFunction_New(&intercept, nb::make_tuple(handlers, otherwise).ptr()));
      },
      "handlers"_a, "otherwise"_a);
  m.def("wrap_as", &wrap_as, "kind"_a, "local"_a, "spec"_a, "digest"_a.none() = nb::none());
}

void bind_random(nb::module_& m) {
  m.attr("DISTRIBUTIONS") = names_of(kDistributionNames, kDistributions);
  m.attr("LEVELS") = names_of(kSimdLevelNames, static_cast<size_t>(best_simd_level()) + 1);
  m.def(
      "fill_random",
      [](uint64_t address, unsigned dtype, unsigned distribution, nb::int_ seed, nb::int_ stream,
         std::vector<int64_t> shape, std::vector<int64_t> offsets, std::vector<int64_t> sizes,
         nb::handle a, nb::handle b, unsigned level) {
        const auto best = static_cast<unsigned>(best_simd_level());
        if (dtype >= kDTypes || distribution >= kDistributions)
          throw std::invalid_argument("no such dtype or distribution");
        const auto kind = static_cast<Distribution>(distribution);
        const SampleParams params = params_of(kind, seed, stream, a, b);
        const Tile tile = {std::move(shape), std::move(offsets), std::move(sizes)};
        nb::gil_scoped_release unlocked;
        fill_random(reinterpret_cast<char*>(address), static_cast<DType>(dtype), kind, params, tile,
                    static_cast<SimdLevel>(std::min(level, best)));
      },
      "address"_a, "dtype"_a, "distribution"_a, "seed"_a, "stream"_a, "shape"_a, "offsets"_a,
      "sizes"_a, "a"_a, "b"_a, "level"_a = ~0u);
}

/// What is wanted of a part, from Python; chunks from `begin` to `end` are read.
Runs runs_from(const nb::tuple& runs, const ChunkedPart& part, size_t begin, size_t end) {
  Runs wanted;
  wanted.target = reinterpret_cast<char*>(nb::cast<uintptr_t>(nb::handle(runs[0])));
  wanted.first = nb::cast<size_t>(runs[1]);
  wanted.run = nb::cast<size_t>(runs[2]);
  wanted.counts = nb::cast<std::vector<size_t>>(runs[3]);
  wanted.from = nb::cast<std::vector<size_t>>(runs[4]);
  wanted.to = nb::cast<std::vector<int64_t>>(runs[5]);
  if (wanted.counts.size() != wanted.from.size() || wanted.counts.size() != wanted.to.size())
    throw std::invalid_argument("runs have a distance in each dim");
  const bool empty =
      wanted.run == 0 || std::count(wanted.counts.begin(), wanted.counts.end(), size_t{0}) > 0;
  if (wanted.target != nullptr && (empty || wanted.end() > part.bytes))
    throw std::invalid_argument("runs lie within the part");
  if (begin > end || end > part.bytes || begin % part.chunk ||
      (end % part.chunk && end != part.bytes))
    throw std::invalid_argument("whole chunks are read");
  return wanted;
}

size_t chunks_in(size_t nbytes, size_t chunk) {
  if (chunk == 0) throw std::invalid_argument("a chunk has bytes");
  return (nbytes + chunk - 1) / chunk;
}

/// A read from Python, and the number of the part's chunks: (descriptor, offset, bytes, runs, begin,
/// end, ...).
std::pair<PartRead, size_t> part_read_from(const nb::tuple& given, size_t chunk) {
  PartRead read;
  read.fd = nb::cast<int>(nb::handle(given[0]));
  read.part.offset = nb::cast<uint64_t>(nb::handle(given[1]));
  read.part.bytes = nb::cast<size_t>(nb::handle(given[2]));
  read.part.chunk = chunk;
  read.begin = nb::cast<size_t>(nb::handle(given[4]));
  read.end = nb::cast<size_t>(nb::handle(given[5]));
  const size_t chunks = chunks_in(read.part.bytes, chunk);
  read.runs = runs_from(nb::cast<nb::tuple>(nb::handle(given[3])), read.part, read.begin, read.end);
  return {std::move(read), chunks};
}

/// None, or what is wrong: (number of the read, chunk, checksum, error). The checksum is None at the
/// file's end; the error is 0 unless the system cannot read.
nb::object read_all(FileReader& reader, const std::vector<PartRead>& reads) {
  ReadOutcome outcome;
  {
    nb::gil_scoped_release unlocked;
    outcome = reader.read(reads);
  }
  if (outcome.kind == ReadOutcome::kRead) return nb::none();
  nb::object found = nb::none();
  if (outcome.kind == ReadOutcome::kDamaged) found = nb::int_(outcome.found);
  return nb::make_tuple(outcome.read, outcome.chunk, found, outcome.error);
}

nb::object read_parts(FileReader& reader, const nb::list& given, size_t chunk) {
  std::vector<PartRead> reads;
  for (nb::handle each : given) {
    const nb::tuple item = nb::cast<nb::tuple>(each);
    auto [read, chunks] = part_read_from(item, chunk);
    const nb::bytes checksums = nb::cast<nb::bytes>(nb::handle(item[6]));
    const nb::bytes checked = nb::cast<nb::bytes>(nb::handle(item[7]));
    if (checked.size() != chunks || checksums.size() != chunks * sizeof(uint32_t))
      throw std::invalid_argument("there is a checksum for each chunk");
    // `given` keeps both.
    read.part.checksums = static_cast<const uint32_t*>(static_cast<const void*>(checksums.c_str()));
    read.part.checked = checked.c_str();
    reads.push_back(std::move(read));
  }
  return read_all(reader, reads);
}

nb::object read_shares(FileReader& reader, const nb::list& given, size_t chunk, uintptr_t shares,
                       size_t count) {
  std::vector<PartRead> reads;
  for (nb::handle each : given) {
    const nb::tuple item = nb::cast<nb::tuple>(each);
    auto [read, chunks] = part_read_from(item, chunk);
    const size_t at = nb::cast<size_t>(nb::handle(item[6]));
    if (at > count || chunks > count - at)
      throw std::invalid_argument("there is room for a share of each chunk");
    read.part.shares = reinterpret_cast<uint32_t*>(shares) + at;
    reads.push_back(std::move(read));
  }
  return read_all(reader, reads);
}

void bind_memory_hold(nb::module_& m) {
  m.def(
      "set_storage_layout",
      [](size_t data, size_t context, size_t deleter, uintptr_t free_memory) {
        set_storage_layout({data, context, deleter, free_memory});
      },
      "data"_a, "context"_a, "deleter"_a, "free_memory"_a);
  nb::class_<MemoryHold>(m, "MemoryHold")
      .def(
          "__init__",
          [](MemoryHold* self, std::vector<nb::object> storages,
             const std::vector<std::tuple<uintptr_t, uintptr_t, size_t>>& written) {
            std::vector<WrittenSpan> spans;
            for (const auto& [storage, address, bytes] : written)
              spans.push_back({storage, address, bytes});
            new (self) MemoryHold(std::move(storages), std::move(spans));
          },
          "storages"_a, "written"_a)
      .def("copy_to_moved", &MemoryHold::copy_to_moved)
      .def("release", &MemoryHold::release);
}

void bind_files(nb::module_& m) {
  nb::class_<FileReader>(m, "FileReader")
      .def(nb::init<>())
      .def("read", read_parts, "reads"_a, "chunk"_a)
      .def("read_shares", read_shares, "reads"_a, "chunk"_a, "shares"_a, "count"_a);
  m.def(
      "copy_streamed",
      [](const std::vector<std::tuple<uintptr_t, uintptr_t, size_t>>& copies) {
        nb::gil_scoped_release unlocked;
        for (const auto& [to, from, bytes] : copies)
          copy_streaming(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
      },
      "copies"_a);
  m.def("start_writeback", start_writeback, "fd"_a, "offset"_a, "nbytes"_a,
        nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace
}  // namespace tilework

NB_MODULE(_core, m) {
  using namespace tilework;
  nb::set_leak_warnings(false);  // groups may live until the process ends
  watch_forks();
  m.attr("ABI") = kAbi;
  m.attr("DEFAULT_SLOT_BYTES") = kDefaultSlotBytes;
  m.attr("MAX_RANKS") = kMaxRanks;
  m.attr("DEFAULT_TUNABLES") = dict_of({});
  m.attr("NEVER_BYTES") = kNeverBytes;
  m.attr("KINDS") = names_of(kKindNames, kKinds);
  m.attr("DTYPES") = names_of(kDTypeNames, kDTypes);
  m.attr("REDUCE_OPS") = names_of(kReduceOpNames, kReduceOps);

  PyObject* fault = PyErr_NewException("tilework._core.Fault", PyExc_RuntimeError, nullptr);
  m.attr("Fault") = nb::steal(fault);
  nb::register_exception_translator(translate_fault, fault);

  m.def(
      "create_segment",
      [](int size, size_t slot_bytes, const nb::bytes& nonce, const nb::dict& tunables) {
        return create_segment(size, slot_bytes, std::string(nonce.c_str(), nonce.size()),
                              tunables_of(tunables));
      },
      "size"_a, "slot_bytes"_a, "nonce"_a, "tunables"_a = nb::dict());
  m.def(
      "segment_bytes",
      [](int size, size_t slot_bytes) { return SegmentLayout(size, slot_bytes, 0).total; },
      "size"_a, "slot_bytes"_a);
  m.def(
      "crc32",
      [](uint64_t address, size_t nbytes, uint32_t crc) {
        nb::gil_scoped_release unlocked;
        return crc32(reinterpret_cast<const void*>(address), nbytes, crc);
      },
      "address"_a, "nbytes"_a, "crc"_a = 0);
  m.def(
      "shape_label",
      [](const nb::tuple& sizes) {
        uint64_t label = kNoSizes;
        for (nb::handle size : sizes) label = add_size(label, nb::cast<int64_t>(size));
        return label;
      },
      "shape"_a);
  m.def(
      "register_torch",
      [](nb::handle tensor_type, nb::handle parameter_type, nb::handle increment_version,
         const nb::dict& reductions, nb::handle in_library) {
        set_reduce_op_objects(reductions);
        set_library_filter(in_library.ptr());
        return set_tensor_types(tensor_type.ptr(), parameter_type.ptr(), increment_version.ptr());
      },
      "tensor_type"_a, "parameter_type"_a, "increment_version"_a, "reductions"_a, "in_library"_a);
  m.def(
      "set_tensor_layout",
      [](size_t impl, size_t flags, uint64_t negative, size_t counter, size_t number) {
        set_tensor_layout({impl, flags, negative, counter, number});
      },
      "impl"_a, "flags"_a, "negative"_a, "counter"_a, "number"_a);
  m.def("is_negative", [](nb::handle tensor) { return is_negative(tensor.ptr()); }, "tensor"_a);
  m.def(
      "bump_version",
      [](nb::handle tensor) {
        if (!bump_versions(tensor.ptr())) throw nb::python_error();
      },
      "tensor"_a);
  m.def("set_core_limit", [](uint32_t cores) { core_limit().store(cores); }, "cores"_a);
  m.def("set_profiled", &set_profiled, "profiled"_a);
  m.def("set_long_wait", &set_long_wait, "fn"_a.none(), "seconds"_a);
  m.def(
      "calibrate",
      [](const std::vector<int>& cpus, int ranks, bool huge, bool insists) {
        Calibration result;
        {
          nb::gil_scoped_release unlocked;
          result = calibrate(cpus, ranks, huge, insists);
        }
        nb::list measurements;
        for (const Measurement& one : result.measurements)
          measurements.append(nb::make_tuple(one.operation, one.bytes, one.way, one.seconds));
        return nb::make_tuple(dict_of(result.tunables), measurements);
      },
      "cpus"_a, "ranks"_a = 2, "huge"_a = false, "insists"_a = false);
  bind_completion(m);
  bind_posted_call(m);
  bind_wait_history(m);
  bind_group(m);
  bind_arena(m);
  bind_flight_ring(m);
  bind_fast_path(m);
  bind_random(m);
  bind_files(m);
  bind_memory_hold(m);
  bind_provenance(m);
  bind_operator_call(m);
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(close_all));
}

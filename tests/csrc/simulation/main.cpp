// A deterministic simulation of the core: random programs of collectives and messages, on ranks that
// are fibers under one scheduler. The same seed gives the same interleaving.
//
//   simulate [--seed N] [--first N] [--trials N] [--seconds S] [--events N]
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <string>

#include "memory.h"
#include "names.h"
#include "rank_program.h"
#include "system.h"

namespace tilework::simulation {
namespace {

constexpr size_t kSlotBytes = 4096;
constexpr size_t kMachineBytes = 4 << 20;  // arenas have a share each
constexpr uint64_t kTrialsOfProcess = 200;

struct Options {
  uint64_t first = 1, trials = UINT64_MAX;
  double seconds = 60;
  size_t events = 40;
  bool replay = false;
};

/// Shared with the processes that run the trials.
struct Totals {
  uint64_t trials, operations, points, seed;
};

/// For the handler of a crash.
const Schedule* schedule_in_trial = nullptr;
uint64_t seed_in_trial = 0;

void print_events(const Schedule& schedule, size_t most) {
  const std::vector<Event> events = schedule.events();
  const size_t first = events.size() > most ? events.size() - most : 0;
  for (size_t i = first; i < events.size(); ++i) {
    const Event& event = events[i];
    // Numbers of this size are addresses, which differ from run to run.
    const std::string value = event.value >> 40 ? "…" : std::to_string(event.value);
    printf("%8llu %9.3f ms  rank %d, thread %-2d %-18s %s%s  (%s)\n",
           static_cast<unsigned long long>(event.point), (event.now - 1e9) / 1e6, event.rank,
           event.fiber, event.what, name_of(event.place).c_str(),
           event.place ? (" = " + value).c_str() : "", code_place(event.code).c_str());
  }
}

void crashed(int signal_number) {
  printf("seed %llu: crashed by signal %d (%s)\n", static_cast<unsigned long long>(seed_in_trial),
         signal_number, strsignal(signal_number));
  fflush(stdout);
  _exit(1);
}

/// True if the trial of a seed went well.
bool run_trial(uint64_t seed, const Options& options, Totals& totals) {
  seed_in_trial = totals.seed = seed;
  Trial trial{draw_plan(seed), {}, {}, 0};
  const Plan& plan = trial.plan;
  if (options.replay) printf("%s\n", plan.text().c_str());
  reset_memory();
  forget_places();
  const Remains remains = plan.mishap == Mishap::kExec     ? Remains::kProgram
                          : plan.mishap == Mishap::kReused ? Remains::kNumber
                                                           : Remains::kNothing;
  set_machine(plan.cores, kMachineBytes, remains);
  for (const auto& members : plan.groups)
    trial.segments.push_back(
        create_segment(static_cast<int>(members.size()), kSlotBytes, "nonce", plan.tunables));
  trial.entered.resize(plan.steps.size());
  Schedule schedule(seed, plan.policy);
  schedule_in_trial = &schedule;
  for (int rank = 0; rank < plan.ranks; ++rank)
    schedule.spawn(rank, [&trial, rank] { run_rank(trial, rank); });
  const std::string failure = schedule.run();
  if (!failure.empty() || options.replay) {
    printf("\nThe last events, after so many scheduling points:\n");
    print_events(schedule, options.events);
  }
  if (!failure.empty())
    printf("\nseed %llu: %s\nagain: build/simulation/simulate --seed %llu\n",
           static_cast<unsigned long long>(seed), failure.c_str(),
           static_cast<unsigned long long>(seed));
  for (const int fd : trial.segments) close(fd);
  unmap_leftovers();
  ++totals.trials;
  totals.operations += trial.operations;
  totals.points += schedule.points();
  return failure.empty();
}

double seconds_since(const timespec& start) {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec - start.tv_sec) + (now.tv_nsec - start.tv_nsec) / 1e9;
}

/// Trials in processes, one after the other, so that what dead ranks leave ends with them.
bool run_trials(const Options& options, Totals& totals) {
  timespec start;
  clock_gettime(CLOCK_MONOTONIC, &start);
  uint64_t next = options.first;
  const uint64_t end =
      options.trials > UINT64_MAX - options.first ? UINT64_MAX : options.first + options.trials;
  while (next < end && (next == options.first || seconds_since(start) < options.seconds)) {
    const uint64_t stop = std::min(end, next + kTrialsOfProcess);
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
      bool good = true;
      for (; good && next < stop && seconds_since(start) < options.seconds; ++next)
        good = run_trial(next, options, totals);
      fflush(stdout);
      _exit(good ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (status != 0) return false;
    next = stop;
  }
  return true;
}

Options parse(int count, char** arguments) {
  Options options;
  for (int i = 1; i + 1 < count; i += 2) {
    const std::string name = arguments[i];
    const char* value = arguments[i + 1];
    if (name == "--seed") {
      options.first = strtoull(value, nullptr, 10);
      options.trials = 1;
      options.replay = true;
    } else if (name == "--first") {
      options.first = strtoull(value, nullptr, 10);
    } else if (name == "--trials") {
      options.trials = strtoull(value, nullptr, 10);
    } else if (name == "--seconds") {
      options.seconds = strtod(value, nullptr);
    } else if (name == "--events") {
      options.events = strtoull(value, nullptr, 10);
    } else {
      count = 0;
    }
  }
  if (count % 2 == 1) return options;
  fprintf(stderr,
          "usage: simulate [--seed N] [--first N] [--trials N] [--seconds S] [--events N]\n");
  exit(2);
}

}  // namespace

int simulate(int count, char** arguments) {
  const Options options = parse(count, arguments);
  for (const int number : {SIGSEGV, SIGBUS, SIGABRT, SIGFPE}) signal(number, crashed);
  auto* totals = static_cast<Totals*>(
      mmap(nullptr, sizeof(Totals), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  const bool good = run_trials(options, *totals);
  printf(
      "%llu trials from seed %llu, %llu operations with the right elements, %llu scheduling "
      "points%s\n",
      static_cast<unsigned long long>(totals->trials),
      static_cast<unsigned long long>(options.first),
      static_cast<unsigned long long>(totals->operations),
      static_cast<unsigned long long>(totals->points),
      good ? ": nothing wrong" : "; the last one went wrong");
  return good ? 0 : 1;
}

}  // namespace tilework::simulation

int main(int count, char** arguments) { return tilework::simulation::simulate(count, arguments); }

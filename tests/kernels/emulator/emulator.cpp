#include <setjmp.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "cuda_runtime.h"

namespace emulator {

Thread* current = nullptr;

namespace {

constexpr size_t kStackBytes = 64 << 10;

struct Barrier {
  unsigned generation = 0;
  unsigned arrived = 0;
};

struct Warp : Barrier {
  uint64_t words[2][32];
};

struct Fiber : Thread {
  ucontext_t start;
  jmp_buf resume;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  Barrier* waits_for = nullptr;
  unsigned waits_while = 0;
  bool started = false;
  bool done = false;

  bool blocked() const { return waits_for != nullptr && waits_for->generation == waits_while; }
};

jmp_buf scheduler;
std::vector<std::unique_ptr<Fiber>> fibers;
std::vector<Warp> warps;
Barrier barrier;
unsigned live;
const std::function<void()>* body;
std::mt19937 order(0);

Fiber& self() { return static_cast<Fiber&>(*current); }

void enter() {
  (*body)();
  self().done = true;
  if (--live > 0 && barrier.arrived == live) {  // a barrier does not wait for a thread that left
    barrier.arrived = 0;
    ++barrier.generation;
  }
  _longjmp(scheduler, 1);
}

void arrive(Barrier& at, unsigned expected) {
  const unsigned generation = at.generation;
  if (++at.arrived == expected) {
    at.arrived = 0;
    ++at.generation;
  }
  Fiber& fiber = self();
  fiber.waits_for = &at;
  fiber.waits_while = generation;
  if (_setjmp(fiber.resume) == 0) _longjmp(scheduler, 1);
}

// Not inlined: what longjmp may clobber must not be the caller's loop.
__attribute__((noinline)) void resume(Fiber& fiber) {
  current = &fiber;
  if (_setjmp(scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.resume, 1);
  fiber.started = true;
  setcontext(&fiber.start);
}

void run_block(unsigned threads) {
  barrier = Barrier{};
  warps.assign(threads / 32, Warp{});
  live = threads;
  std::vector<unsigned> turn(threads);
  std::iota(turn.begin(), turn.end(), 0u);
  while (live > 0) {
    std::shuffle(turn.begin(), turn.end(), order);
    bool progress = false;
    for (unsigned i : turn) {
      Fiber& fiber = *fibers[i];
      if (fiber.done || fiber.blocked()) continue;
      progress = true;
      resume(fiber);
    }
    if (!progress) {
      std::fprintf(stderr, "emulator: threads wait for a barrier that others never reach\n");
      std::abort();
    }
  }
}

}  // namespace

void run(dim3 grid, dim3 block, const std::function<void()>& kernel) {
  if (block.x % 32 != 0 || block.y * block.z != 1) std::abort();
  body = &kernel;
  while (fibers.size() < block.x) fibers.push_back(std::make_unique<Fiber>());
  const unsigned blocks = grid.x * grid.y * grid.z;
  std::vector<unsigned> turn(blocks);
  std::iota(turn.begin(), turn.end(), 0u);
  std::shuffle(turn.begin(), turn.end(), order);
  for (unsigned b : turn) {
    const dim3 index(b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y);
    for (unsigned t = 0; t < block.x; ++t) {
      Fiber& fiber = *fibers[t];
      static_cast<Thread&>(fiber) = {dim3(t, 0, 0), index, block, grid};
      fiber.started = fiber.done = false;
      fiber.waits_for = nullptr;
      getcontext(&fiber.start);
      fiber.start.uc_stack.ss_sp = fiber.stack.get();
      fiber.start.uc_stack.ss_size = kStackBytes;
      makecontext(&fiber.start, enter, 0);
    }
    run_block(block.x);
  }
}

void block_barrier() { arrive(barrier, live); }

const uint64_t* exchange(uint64_t word) {
  Warp& warp = warps[current->index.x / 32];
  // Two sets of words: nobody writes a set before all have left the exchange that read it.
  uint64_t* words = warp.words[warp.generation % 2];
  words[lane()] = word;
  arrive(warp, 32);
  return words;
}

}  // namespace emulator

extern "C" __attribute__((visibility("default"))) void emulator_seed(unsigned seed) { emulator::order.seed(seed); }

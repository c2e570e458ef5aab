#include <setjmp.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "cuda_runtime.h"

namespace emulator {

Thread* current = nullptr;

namespace {

constexpr size_t kStackBytes = 96 << 10, kSharedBytes = 101376;
constexpr unsigned kMostRounds = 3'000'000;

enum class Wait { kNothing, kWarp, kMbarrier, kBarrier };

struct Mbarrier {
  int arrivals = 0, pending = 0;
  long bytes = 0;
  unsigned phase = 0;

  void settle() {
    if (pending < 0) {
      std::fprintf(stderr, "emulator: more arrivals than an mbarrier counts\n");
      std::abort();
    }
    if (pending > 0 || bytes != 0) return;
    ++phase;
    pending = arrivals;
  }
};
struct Meeting {
  unsigned arrived = 0, generation = 0;
  bool arrive(unsigned expected) {
    if (++arrived < expected) return false;
    arrived = 0;
    ++generation;
    return true;
  }
};
struct Copy {
  uint32_t to;
  const void* from;
  int bytes;
  uint32_t bar;
  int delay;
  bool swizzled;
};
struct Warp : Meeting {
  uint64_t words[2][kWarp];
  void* brought[kWarp];
  int held_up = 0;
};
struct Fiber;
struct Block {
  std::vector<uint8_t> memory = std::vector<uint8_t>(kSharedBytes, 0xff);
  std::map<uint32_t, Mbarrier> mbarriers;
  Meeting barriers[16];
  std::vector<Copy> copies;
  std::set<uint32_t> copy_guards;  // mbarriers that a thread waits for before it copies
  std::vector<Warp> warps;
  std::vector<Fiber*> fibers;
};
struct Fiber : Thread {
  ucontext_t start;
  jmp_buf resume;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  Block* home = nullptr;
  bool started = false, done = false;
  Wait wait = Wait::kNothing;
  uint32_t at = 0;  // barrier
  uint32_t last_mbarrier = 0;  // that it waited for
  unsigned since = 0;  // generation or parity

  Warp& warp() const { return home->warps[index.x / kWarp]; }
  bool ready() const {
    switch (wait) {
      case Wait::kWarp: return warp().generation != since;
      case Wait::kMbarrier: return (home->mbarriers[at].phase & 1) != since;
      case Wait::kBarrier: return home->barriers[at].generation != since;
      default: return true;
    }
  }
};

jmp_buf scheduler;
std::vector<std::unique_ptr<Fiber>> fibers;
const std::function<void()>* body;
std::mt19937 chance;

Fiber& self() { return static_cast<Fiber&>(*current); }

void enter() {
  (*body)();
  self().done = true;
  _longjmp(scheduler, 1);
}
void suspend(Wait wait, uint32_t at, unsigned since) {
  Fiber& fiber = self();
  fiber.wait = wait;
  fiber.at = at;
  fiber.since = since;
  if (_setjmp(fiber.resume) == 0) _longjmp(scheduler, 1);
}
// Not inlined: what longjmp may clobber must not be the caller's loop.
__attribute__((noinline)) void resume(Fiber& fiber) {
  current = &fiber;
  fiber.wait = Wait::kNothing;
  if (_setjmp(scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.resume, 1);
  fiber.started = true;
  setcontext(&fiber.start);
}

Mbarrier& mbarrier(uint32_t bar) {
  const auto found = self().home->mbarriers.find(bar);
  if (found == self().home->mbarriers.end()) {
    std::fprintf(stderr, "emulator: no mbarrier at %u\n", bar);
    std::abort();
  }
  return found->second;
}

bool land_copies(Block& block) {
  const bool any = !block.copies.empty();
  std::vector<Copy> later;
  for (Copy& copy : block.copies) {
    if (copy.delay-- > 0) {
      later.push_back(copy);
      continue;
    }
    for (int i = 0; i < copy.bytes; i += 16) {
      uint32_t to = copy.to + i;
      if (copy.swizzled) to ^= (to >> 7 & 7) << 4;
      std::memcpy(block.memory.data() + to, static_cast<const uint8_t*>(copy.from) + i, 16);
    }
    block.mbarriers[copy.bar].bytes -= copy.bytes;
    block.mbarriers[copy.bar].settle();
  }
  block.copies = std::move(later);
  return any;
}

bool run_warp(Block& block, unsigned w, unsigned& live) {
  Warp& warp = block.warps[w];
  if (warp.held_up > 0) {
    --warp.held_up;
    return true;
  }
  // Now and then a warp is late, sometimes by more than a turn of the ring.
  if (chance() % 400 == 0) warp.held_up = chance() % (chance() % 8 == 0 ? 1500 : 60);
  bool progress = false;
  const bool backwards = chance() & 1;
  for (unsigned i = 0; i < kWarp; ++i) {
    Fiber& fiber = *block.fibers[w * kWarp + (backwards ? kWarp - 1 - i : i)];
    if (fiber.done || !fiber.ready()) continue;
    progress = true;
    resume(fiber);
    live -= fiber.done;
  }
  return progress;
}

[[noreturn]] void report(const char* what, unsigned seed, const std::vector<std::unique_ptr<Block>>& blocks) {
  std::fprintf(stderr, "emulator: %s, seed %u\n", what, seed);
  for (size_t b = 0; b < blocks.size(); ++b)
    for (size_t t = 0; t < blocks[b]->fibers.size(); t += kWarp) {
      const Fiber& fiber = *blocks[b]->fibers[t];
      if (!fiber.done)
        std::fprintf(stderr, "block %zu warp %zu waits: kind %d, barrier %u, since %u\n", b,
                     t / kWarp, static_cast<int>(fiber.wait), fiber.at, fiber.since);
    }
  std::abort();
}

}  // namespace

uint8_t* shared() { return self().home->memory.data(); }
void pause() { suspend(Wait::kNothing, 0, 0); }

const uint64_t* exchange(uint64_t word) {
  Warp& warp = self().warp();
  // Two sets of words: nobody writes a set before all have left the exchange that read it.
  uint64_t* words = warp.words[warp.generation % 2];
  words[lane()] = word;
  const unsigned since = warp.generation;
  warp.arrive(kWarp);
  suspend(Wait::kWarp, 0, since);
  return words;
}
void together(void* mine, void (*work)(void** lanes)) {
  Warp& warp = self().warp();
  warp.brought[lane()] = mine;
  const unsigned since = warp.generation;
  if (warp.arrive(kWarp)) work(warp.brought);
  suspend(Wait::kWarp, 0, since);
}
void named_barrier(int id, unsigned threads) {
  Meeting& meeting = self().home->barriers[id];
  const unsigned since = meeting.generation;
  meeting.arrive(threads);
  suspend(Wait::kBarrier, static_cast<uint32_t>(id), since);
}
void mbar_init(uint32_t bar, int arrivals) { self().home->mbarriers[bar] = {arrivals, arrivals}; }
void mbar_arrive(uint32_t bar, int bytes, bool after_loads) {
  Mbarrier& at = mbarrier(bar);
  // Loads happen at once here; on a GPU the copy can overtake those that the arrival leaves behind.
  if (!after_loads && self().home->copy_guards.count(bar)) {
    std::fprintf(stderr, "emulator: an arrival at %u frees memory that may still be read\n", bar);
    std::abort();
  }
  at.bytes += bytes;
  --at.pending;
  at.settle();
  pause();
}
void mbar_wait(uint32_t bar, int parity) {
  mbarrier(bar);
  self().last_mbarrier = bar;
  suspend(Wait::kMbarrier, bar, static_cast<unsigned>(parity));
}
static void copy_later(uint32_t to, const void* from, int bytes, uint32_t bar, bool swizzled) {
  if (to % (swizzled ? 128 : 16) != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0 || bytes % 16 != 0) {
    std::fprintf(stderr, "emulator: a copy of %d bytes to %u is not aligned\n", bytes, to);
    std::abort();
  }
  if (self().last_mbarrier != 0) self().home->copy_guards.insert(self().last_mbarrier);
  // Now and then a copy is overtaken by all that a ring holds, as when its page's address is not cached.
  const int delay = static_cast<int>(chance() % (chance() % 60 == 0 ? 4000 : 60));
  self().home->copies.push_back({to, from, bytes, bar, delay, swizzled});
}
void copy_later(uint32_t to, const void* from, int bytes, uint32_t bar) {
  copy_later(to, from, bytes, bar, false);
}
void copy_swizzled_later(uint32_t to, const void* from, int bytes, uint32_t bar) {
  copy_later(to, from, bytes, bar, true);
}

void run(unsigned grid, unsigned threads, const std::function<void()>& kernel, unsigned seed) {
  chance.seed(seed);
  body = &kernel;
  while (fibers.size() < grid * threads) fibers.push_back(std::make_unique<Fiber>());
  std::vector<std::unique_ptr<Block>> blocks;
  for (unsigned b = 0; b < grid; ++b) {
    blocks.push_back(std::make_unique<Block>());
    blocks[b]->warps.resize(threads / kWarp);
    for (unsigned t = 0; t < threads; ++t) {
      Fiber& fiber = *fibers[b * threads + t];
      static_cast<Thread&>(fiber) = {{t, 0, 0}, {b, 0, 0}};
      fiber.home = blocks[b].get();
      fiber.started = fiber.done = false;
      fiber.wait = Wait::kNothing;
      fiber.last_mbarrier = 0;
      getcontext(&fiber.start);
      fiber.start.uc_stack.ss_sp = fiber.stack.get();
      fiber.start.uc_stack.ss_size = kStackBytes;
      makecontext(&fiber.start, enter, 0);
      blocks[b]->fibers.push_back(&fiber);
    }
  }
  std::vector<unsigned> turn(grid * threads / kWarp);
  std::iota(turn.begin(), turn.end(), 0u);
  unsigned live = grid * threads, rounds = 0;
  while (live > 0) {
    std::shuffle(turn.begin(), turn.end(), chance);
    bool progress = false;
    for (auto& block : blocks) progress |= land_copies(*block);
    for (const unsigned t : turn)
      progress |= run_warp(*blocks[t / (threads / kWarp)], t % (threads / kWarp), live);
    if (!progress) report("deadlock", seed, blocks);
    if (++rounds > kMostRounds) report("no end", seed, blocks);
  }
}

}  // namespace emulator

void __syncthreads() {
  emulator::named_barrier(0, static_cast<unsigned>(emulator::self().home->fibers.size()));
}

// A step's threads: work is cut into small units that whoever is running takes next, so that a thread which the system
// has put aside delays only the one unit it holds. Workers look for work for a moment after the last (the gaps inside a
// step are microseconds), then sleep, so that between steps the cores belong to others.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

class Pool {
  public:
    explicit Pool(int threads) {
        for (int i = 1; i < threads; ++i) std::thread([this] { work(); }).detach();
        workers_ = threads - 1;
    }

    // Calls body(i) for every i in [0, units), on all threads; returns when all are done.
    template <class Body> void each(int64_t units, const Body& body) {
        if (workers_ == 0 || units < 2) {
            for (int64_t i = 0; i < units; ++i) body(i);
            return;
        }
        call_ = [](const void* b, int64_t i) { (*static_cast<const Body*>(b))(i); };
        body_ = &body;
        units_ = units;
        left_.store(units, std::memory_order_relaxed);
        next_.store(0, std::memory_order_release);  // opens the round: who sees it sees what was written above
        round_.fetch_add(1);
        if (sleepers_.load() > 0) round_.notify_all();
        take();
        wait([this] { return left_.load(std::memory_order_acquire) == 0; });
        next_.exchange(CLOSED);
        wait([this] { return inside_.load() == 0; });  // nobody may still look at this round's body
    }

  private:
    static constexpr int64_t CLOSED = INT64_MAX / 2;
    static constexpr int SPINS = 4000;  // some 50 µs

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#else
        std::this_thread::yield();
#endif
    }

    template <class Condition> static void wait(const Condition& holds) {
        for (int i = 0; !holds(); ++i) i < SPINS ? pause() : std::this_thread::yield();
    }

    void take() {
        for (int64_t i; (i = next_.fetch_add(1, std::memory_order_acq_rel)) < units_;) {
            call_(body_, i);
            left_.fetch_sub(1, std::memory_order_release);
        }
    }

    void work() {
        uint32_t seen = 0;
        for (;;) {
            for (int i = 0; i < SPINS && round_.load(std::memory_order_acquire) == seen; ++i) pause();
            if (round_.load(std::memory_order_acquire) == seen) {
                sleepers_.fetch_add(1);
                round_.wait(seen);
                sleepers_.fetch_sub(1);
            }
            inside_.fetch_add(1);
            seen = round_.load();
            if (next_.load() < units_) take();
            inside_.fetch_sub(1);
        }
    }

    int workers_ = 0;
    void (*call_)(const void*, int64_t) = nullptr;
    const void* body_ = nullptr;
    int64_t units_ = 0;
    alignas(64) std::atomic<int64_t> next_{CLOSED};
    alignas(64) std::atomic<int64_t> left_{0};
    alignas(64) std::atomic<uint32_t> round_{0};
    alignas(64) std::atomic<int> inside_{0};
    std::atomic<int> sleepers_{0};
};

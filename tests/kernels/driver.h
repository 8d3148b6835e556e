// What the drivers of the kernels share: memory of exactly the size that a kernel may use, fixed inputs, and digests.
//
// A driver is a program without Python. It calls the functions of one kernel source on fixed inputs and prints a line for each
// call: the case, the number of threads, and a digest of the result. kernel_drivers.py builds the drivers, and says with what.
//
// The argument selects the sizes: "short", "full", or "count" and a number of rows, for a call of each function whose
// instructions are counted.

#pragma once

#ifdef GUARD_PAGES
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

// Memory for `num` elements and no byte more. AddressSanitizer reports an access behind its end. With GUARD_PAGES it ends where
// a page begins that may not be accessed, as memory that is mapped from a file or shared among processes may.
template <class T>
class Exact {
  public:
    Exact() = default;

    // alignment: of the first element, in bytes. A kernel that asks for 64 gets a size that is a multiple of 64.
    explicit Exact(int64_t num, size_t alignment = alignof(T)) : num_(num) {
        const size_t num_bytes = num * sizeof(T);
#ifdef GUARD_PAGES
        const size_t page = sysconf(_SC_PAGESIZE), whole = (num_bytes + page - 1) / page * page;
        size_ = whole + page;
        void* pages = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (pages == MAP_FAILED || mprotect((char*)pages + whole, page, PROT_NONE)) std::abort();
        start_ = (char*)pages;
        data_ = (T*)(start_ + (whole - num_bytes) / alignment * alignment);
#else
        void* memory = nullptr;
        if (posix_memalign(&memory, std::max(alignment, sizeof(void*)), num_bytes)) std::abort();
        start_ = (char*)memory, data_ = (T*)memory;
#endif
        std::memset((void*)data_, 0, num_bytes);
    }

    Exact(Exact&& other) noexcept { swap(other); }
    Exact& operator=(Exact&& other) noexcept {
        swap(other);
        return *this;
    }
    ~Exact() {
#ifdef GUARD_PAGES
        if (start_) munmap(start_, size_);
#else
        std::free(start_);
#endif
    }

    T* data() const { return data_; }
    int64_t size() const { return num_; }
    T& operator[](int64_t i) const { return data_[i]; }
    T* begin() const { return data_; }
    T* end() const { return data_ + num_; }

  private:
    void swap(Exact& other) {
        std::swap(start_, other.start_), std::swap(data_, other.data_);
        std::swap(num_, other.num_), std::swap(size_, other.size_);
    }

    char* start_ = nullptr;
    T* data_ = nullptr;
    int64_t num_ = 0;
    size_t size_ = 0;
};

template <class T>
Exact<T> exact(const std::vector<T>& values) {
    Exact<T> copy(values.size());
    std::copy(values.begin(), values.end(), copy.begin());
    return copy;
}

// The same numbers on every machine.
struct Random {
    uint32_t state = 12345;

    uint32_t next() { return (state = state * 1664525u + 1013904223u) >> 8; }
    float uniform() { return next() / 8388608.0f - 1; }  // -1 .. 1
    int64_t below(int64_t limit) { return next() % limit; }
};

// FNV-1a over values, in which every NaN is the same one: which of its bits are set depends on the instructions.
struct Digest {
    uint64_t hash = 14695981039346656037u;

    void add_bytes(const void* from, size_t num) {
        for (size_t i = 0; i < num; i++) hash = (hash ^ ((const uint8_t*)from)[i]) * 1099511628211u;
    }

    void add(float value) {
        if (value != value) value = NAN;
        add_bytes(&value, sizeof value);
    }
};

enum class Size { SHORT, FULL, COUNT };

inline Size size_of(int num_arguments, char** arguments) {
    const std::string name = num_arguments > 1 ? arguments[1] : "";
    if (name == "short" && num_arguments == 2) return Size::SHORT;
    if (name == "full" && num_arguments == 2) return Size::FULL;
    if (name == "count" && num_arguments == 3) return Size::COUNT;
    std::fprintf(stderr, "usage: %s short|full|count ROWS\n", arguments[0]);
    std::exit(2);
}

inline std::vector<int> threads_of(Size size) {
    if (size == Size::COUNT) return {1};
    return size == Size::FULL ? std::vector<int>{1, 2, 3, 4, 5} : std::vector<int>{1, 2, 3, 5};
}

inline std::vector<int64_t> rows_of(Size size) {
    if (size == Size::FULL) return {1, 2, 5, 8, 9, 16, 17, 31, 33, 64, 65, 97, 129};
    return {1, 3, 17, 65, 129};
}

// As printf.
template <class... Values>
std::string text(const char* format, Values... values) {
    char buffer[256];
    std::snprintf(buffer, sizeof buffer, format, values...);
    return buffer;
}

// The lines of a case must have one digest, whatever the variant is: the number of threads, or the rank.
inline void print(const std::string& name, int variant, const Digest& digest) {
    std::printf("%s | %d | %016llx\n", name.c_str(), variant, (unsigned long long)digest.hash);
}

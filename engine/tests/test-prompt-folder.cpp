// Kept prompts: found by what they share, thrown away oldest first, never used unless they are whole.
#include "check.h"
#include "keep/prompt-folder.h"

#include <csignal>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

namespace fs = std::filesystem;
using tokens = std::vector<int32_t>;

static const std::string KEY(SPAC_KEY_CHARS, 'a'), OTHER_KEY(SPAC_KEY_CHARS, 'b');

struct temporary_folder {
    temporary_folder() {
        char name[] = "/tmp/spac-keep-XXXXXX";
        path        = mkdtemp(name);
    }

    ~temporary_folder() { fs::remove_all(path); }

    std::vector<fs::path> files() const {
        return { fs::directory_iterator(path), fs::directory_iterator() };
    }

    size_t n_bytes() const {
        size_t n = 0;
        for (const fs::path & file : files()) {
            std::error_code gone; // another process has thrown it away
            const size_t    size = fs::file_size(file, gone);
            n += gone ? 0 : size;
        }
        return n;
    }

    std::string path;
};

static tokens counting(int32_t n, int32_t first = 0) {
    tokens t(n);
    for (int32_t i = 0; i < n; i++) {
        t[i] = first + i;
    }
    return t;
}

static spac_parts parts_of(uint32_t seed, size_t n_bytes) {
    std::mt19937 rng(seed);
    spac_parts   parts = { std::vector<uint8_t>(n_bytes), {}, std::vector<uint8_t>(24) };
    for (auto & part : parts) {
        for (auto & byte : part) {
            byte = (uint8_t) rng();
        }
    }
    return parts;
}

static void save(spac_prompt_folder & folder, const tokens & t, const spac_parts & parts) {
    spac_kept_head head = { t, {} };
    for (const auto & part : parts) {
        head.sizes.push_back(part.size());
    }
    folder.save(std::move(head), parts);
}

static tokens load(spac_prompt_folder & folder, const tokens & t, spac_parts & parts, size_t n_min = 0, size_t n_max = 1 << 20) {
    return folder.load(t.data(), t.size(), n_min, n_max, parts);
}

static tokens joined(tokens a, const tokens & b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

static void test_longest_prefix() {
    temporary_folder   dir;
    spac_parts         got;
    spac_prompt_folder folder(dir.path, KEY, 1 << 20);
    CHECK(load(folder, counting(100), got).empty());

    const tokens shared = counting(100), a = joined(shared, counting(20, 1000)), b = joined(shared, counting(40, 2000));
    save(folder, a, parts_of(1, 1000));
    save(folder, b, parts_of(2, 2001));
    CHECK(dir.files().size() == 2);
    CHECK(load(folder, joined(b, counting(5, 9000)), got) == b);
    CHECK(got == parts_of(2, 2001));
    CHECK(load(folder, joined(a, counting(5, 9000)), got) == a);
    CHECK(got == parts_of(1, 1000));
    CHECK(load(folder, a, got, a.size()).empty());        // no more than is there already
    CHECK(load(folder, b, got, 0, 130) == a);             // what fits
    CHECK(load(folder, counting(20), got).empty());       // too small a part of what would be read
    CHECK(load(folder, counting(100, 500), got).empty()); // nothing in common
}

static void test_longer_takes_the_place() {
    temporary_folder   dir;
    spac_parts         got;
    spac_prompt_folder folder(dir.path, KEY, 1 << 20);
    save(folder, counting(50), parts_of(1, 1000));
    save(folder, counting(80), parts_of(2, 1500));
    CHECK(dir.files().size() == 1);
    save(folder, counting(60), parts_of(3, 1200)); // is in it
    CHECK(dir.files().size() == 1);
    CHECK(load(folder, counting(60), got) == counting(80));
    CHECK(got == parts_of(2, 1500));
    for (const fs::path & file : dir.files()) {
        struct stat status;
        CHECK(stat(file.c_str(), &status) == 0 && (status.st_mode & 0777) == 0600);
    }
}

static void test_other_key() {
    temporary_folder   dir;
    spac_parts         got;
    spac_prompt_folder one(dir.path, KEY, 1 << 20), two(dir.path, OTHER_KEY, 1 << 20);
    save(one, counting(50), parts_of(1, 1000));
    CHECK(load(two, counting(50), got).empty());
    save(two, counting(50), parts_of(2, 1000));
    CHECK(load(two, counting(50), got) == counting(50) && got == parts_of(2, 1000));
    CHECK(load(one, counting(50), got) == counting(50) && got == parts_of(1, 1000));

    const std::string  alike = KEY.substr(0, SPAC_KEY_CHARS - 1) + "c"; // the same in a file's name
    spac_prompt_folder three(dir.path, alike, 1 << 20);
    CHECK(load(three, counting(50), got).empty());
}

static void test_size_is_held() {
    temporary_folder   dir;
    spac_parts         got;
    const size_t       max_bytes = 10000;
    spac_prompt_folder folder(dir.path, KEY, max_bytes), other(dir.path, OTHER_KEY, max_bytes);
    for (int32_t i = 0; i < 20; i++) {
        save(i % 3 ? folder : other, counting(50, 1000 * i), parts_of(i, 2000));
        CHECK(dir.n_bytes() <= max_bytes);
    }
    CHECK(load(folder, counting(50, 1000 * 19), got) == counting(50, 1000 * 19));
    CHECK(load(folder, counting(50, 1000 * 1), got).empty()); // the oldest
    // what was used stays longer
    CHECK(!load(folder, counting(50, 1000 * 16), got).empty());
    save(folder, counting(50, 77000), parts_of(77, 2000));
    CHECK(!load(folder, counting(50, 1000 * 16), got).empty());
    save(folder, counting(50, 88000), parts_of(88, max_bytes)); // larger than all
    CHECK(load(folder, counting(50, 88000), got).empty());
    CHECK(dir.n_bytes() <= max_bytes);
    spac_prompt_folder less(dir.path, KEY, 4500);
    CHECK(dir.n_bytes() <= 4500);
}

// every byte of a file counts, and so does each that is missing
static void test_broken_files() {
    temporary_folder dir;
    spac_parts       got;
    {
        spac_prompt_folder(dir.path, KEY, 1 << 20);
    }
    spac_prompt_folder writer(dir.path, KEY, 1 << 20);
    save(writer, counting(40), parts_of(1, 700));
    const fs::path    file = dir.files().at(0);
    std::ifstream     in(file, std::ios::binary);
    const std::string whole{ std::istreambuf_iterator<char>(in), {} };
    in.close();
    const auto finds = [&](const std::string & content) {
        std::ofstream(file, std::ios::binary) << content;
        spac_prompt_folder reader(dir.path, KEY, 1 << 20);
        return load(reader, counting(40), got) == counting(40);
    };
    CHECK(finds(whole));
    for (size_t i = 0; i < whole.size(); i++) {
        std::string changed = whole;
        changed[i]          = (char) (changed[i] ^ (1 << (i % 8)));
        CHECK(!finds(changed));
        CHECK(!finds(whole.substr(0, i)));
    }
    CHECK(!finds(whole + "x"));
    CHECK(!finds(""));
    CHECK(finds(whole));
}

// of equal sizes: other tokens', or those of another model for the same tokens
static void test_parts_of_another() {
    const auto content = [](const std::string & key, const tokens & t, uint32_t seed) {
        temporary_folder   dir;
        spac_prompt_folder folder(dir.path, key, 1 << 20);
        save(folder, t, parts_of(seed, 700));
        std::ifstream in(dir.files().at(0), std::ios::binary);
        return std::string{ std::istreambuf_iterator<char>(in), {} };
    };
    const std::string whole = content(KEY, counting(40), 1), alike = KEY.substr(0, SPAC_KEY_CHARS - 1) + "c";
    const size_t      n_last = 700 + 24 + sizeof(uint64_t); // parts and their sum
    for (const std::string & other : { content(KEY, counting(40, 500), 2), content(alike, counting(40), 2), content(OTHER_KEY, counting(40), 2) }) {
        temporary_folder dir;
        const auto       put = [&](const std::string & all) { std::ofstream(dir.path + "/aaaaaaaaaaaaaaaa-1-1.prompt", std::ios::binary) << all; };
        spac_parts       got;
        put(whole);
        spac_prompt_folder folder(dir.path, KEY, 1 << 20); // has seen the head
        CHECK(load(folder, counting(40), got) == counting(40) && got == parts_of(1, 700));
        CHECK(other.size() == whole.size() && other.substr(whole.size() - n_last) != whole.substr(whole.size() - n_last));
        put(other);
        CHECK(load(folder, counting(40), got).empty() && dir.files().empty());
        put(whole.substr(0, whole.size() - n_last) + other.substr(whole.size() - n_last));
        CHECK(load(folder, counting(40), got).empty() && dir.files().empty());
    }
}

// not used, and thrown away when its room is needed
static void test_other_version() {
    temporary_folder  dir;
    const std::string name = dir.path + "/aaaaaaaaaaaaaaaa-1-1.prompt";
    std::ofstream(name, std::ios::binary) << "spackep1" << std::string(4000, 'x');
    spac_parts         got;
    spac_prompt_folder folder(dir.path, KEY, 6000);
    CHECK(load(folder, counting(40), got).empty());
    save(folder, counting(40), parts_of(1, 700));
    CHECK(dir.files().size() == 2 && load(folder, counting(40), got) == counting(40));
    save(folder, counting(40, 500), parts_of(2, 3000));
    CHECK(!fs::exists(name) && load(folder, counting(40), got) == counting(40));
}

static void test_left_behind() {
    temporary_folder dir;
    std::ofstream(dir.path + "/aaaaaaaaaaaaaaaa-1-1.prompt.tmp") << std::string(5000, 'x');
    spac_prompt_folder folder(dir.path, KEY, 1 << 20);
    CHECK(dir.files().empty());
}

// the limit on a file's size stands for a disk that is full
static void test_no_room() {
    temporary_folder   dir;
    spac_parts         got;
    spac_prompt_folder folder(dir.path, KEY, 1 << 20);
    save(folder, counting(50), parts_of(1, 1000));
    signal(SIGXFSZ, SIG_IGN);
    rlimit before, small;
    CHECK(getrlimit(RLIMIT_FSIZE, &before) == 0);
    small          = before;
    small.rlim_cur = 3000;
    CHECK(setrlimit(RLIMIT_FSIZE, &small) == 0);
    save(folder, counting(80), parts_of(2, 5000));
    save(folder, counting(80, 900), parts_of(3, 5000));
    CHECK(setrlimit(RLIMIT_FSIZE, &before) == 0);
    CHECK(dir.files().size() == 1); // the one before, though the first that failed would have replaced it
    CHECK(load(folder, counting(80), got) == counting(50) && got == parts_of(1, 1000));
    save(folder, counting(80), parts_of(2, 5000));
    CHECK(load(folder, counting(80), got) == counting(80) && got == parts_of(2, 5000));
}

static void test_two_at_once() {
    temporary_folder dir;
    const size_t     max_bytes = 60000;
    const auto       work      = [&](int32_t who) {
        spac_prompt_folder folder(dir.path, KEY, max_bytes);
        for (int32_t i = 0; i < 60; i++) {
            const int32_t first = 1000 * (who * 100 + i);
            save(folder, counting(50, first), parts_of(first, 3000));
            spac_parts   got;
            const tokens found = load(folder, counting(50, first), got);
            CHECK(found.empty() || (found == counting(50, first) && got == parts_of(first, 3000)));
            CHECK(dir.n_bytes() <= max_bytes);
        }
    };
    // in processes of their own, as a lock is a process's
    const pid_t child = fork();
    if (child == 0) {
        work(1);
        _exit(0);
    }
    for (int32_t i = 0; i < 60; i++) {
        spac_prompt_folder folder(dir.path, KEY, max_bytes);
        save(folder, counting(50, 1000 * i), parts_of(i, 3000));
    }
    int status = 1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(dir.n_bytes() <= max_bytes && dir.files().size() > 10);
}

int main() {
    test_longest_prefix();
    test_longer_takes_the_place();
    test_other_key();
    test_size_is_held();
    test_broken_files();
    test_parts_of_another();
    test_other_version();
    test_left_behind();
    test_no_room();
    test_two_at_once();
    return 0;
}

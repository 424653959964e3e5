#include "team-watch.h"

#include "base/clock.h"
#include "dense-matmul.h"
#include "openmp-team.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <set>
#include <string>

#ifdef __linux__
#    include <sched.h>
#endif

static constexpr uint64_t SPREAD_US = 10000, IDLE_US = 1000000;

int spac_team_watch::n_threads(int n_most, int n_tokens) {
    const uint64_t now = spac_now_us();
    if (n_most != crowd.most() || (!team.empty() && team[0] != spac_thread_id())) {
        crowd = spac_crowd(n_most);
        begin(now);
    } else {
        note_forward(now);
        if (now >= t_window) {
            end_window(now);
        } else if (crowd.is_crowded() && now >= t_spread) {
            t_spread = now + SPREAD_US;
            spread();
        }
    }
    t_forward   = now;
    last_tokens = n_tokens;
    return crowd.n_threads();
}

// One whose end is not known is taken to have lasted until now, unless the program did something else for long.
void spac_team_watch::note_forward(uint64_t now_us) {
    const uint64_t t_end = spac_dense_matmul::t_graph_end();
    if (t_end > t_forward) {
        crowd.ran(last_tokens, t_end - t_forward);
    } else if (now_us - t_forward < IDLE_US) {
        crowd.ran(last_tokens, now_us - t_forward);
    }
}

// a window; the team is asked for its ids, as its threads come and go with their number
void spac_team_watch::begin(uint64_t now_us) {
    t_window = now_us + spac_crowd::WINDOW_US;
    if ((int) team.size() != crowd.n_threads() || team[0] != spac_thread_id() || !read_times(before)) {
        team = spac_openmp_threads(crowd.n_threads());
        if ((int) team.size() != crowd.n_threads() || !read_times(before)) {
            team.clear();
        }
    }
}

void spac_team_watch::end_window(uint64_t now_us) {
    std::vector<times> after;
    if (!team.empty() && read_times(after)) {
        crowd.end_window(least_share(after), now_us);
        if (crowd.is_crowded()) {
            spread();
        }
    }
    begin(now_us);
}

// of the threads that wanted a core for a good part of the window
double spac_team_watch::least_share(const std::vector<times> & after) const {
    double least = 1.0;
    for (size_t i = 0; i < team.size(); i++) {
        const double run = after[i].run_ns - before[i].run_ns, wait = after[i].wait_ns - before[i].wait_ns;
        if ((run + wait) / 1e3 >= spac_crowd::WINDOW_US / 4) {
            least = std::min(least, run / (run + wait));
        }
    }
    return least;
}

#ifdef __linux__

struct close_file {
    void operator()(FILE * file) const { fclose(file); }
};

typedef std::unique_ptr<FILE, close_file> file_ptr;

static file_ptr open_of(int thread, const char * name) {
    return file_ptr(fopen(("/proc/self/task/" + std::to_string(thread) + "/" + name).c_str(), "re"));
}

// false: one of them is gone, or the kernel does not count
bool spac_team_watch::read_times(std::vector<times> & out) const {
    out.assign(team.size(), {});
    for (size_t i = 0; i < team.size(); i++) {
        const file_ptr file = open_of(team[i], "schedstat");
        if (!file || fscanf(file.get(), "%" SCNu64 " %" SCNu64, &out[i].run_ns, &out[i].wait_ns) != 2 || out[i].run_ns == 0) {
            return false;
        }
    }
    return true;
}

// where it runs, or ran last; -1: it is gone
static int cpu_of(int thread) {
    static constexpr int FIELDS = 37; // between the name, in which anything may be, and the core
    const file_ptr       file   = open_of(thread, "stat");
    char                 text[1024];
    text[file ? fread(text, 1, sizeof(text) - 1, file.get()) : 0] = 0;
    const char * at                                               = strrchr(text, ')');
    for (int i = 0; at && i < FIELDS; i++) {
        at = strchr(at + 1, ' ');
    }
    return at ? atoi(at + 1) : -1;
}

// The mask is the thread's own again at once: nothing that it starts is bound to a core.
static bool move_to(int thread, int cpu, const cpu_set_t & open) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    const bool is_moved = sched_setaffinity(thread, sizeof(one), &one) == 0;
    sched_setaffinity(thread, sizeof(open), &open);
    return is_moved;
}

void spac_team_watch::spread() {
    std::set<int>    taken;
    std::vector<int> doubled;
    for (const int thread : team) {
        const int cpu = cpu_of(thread);
        if (cpu >= 0 && !taken.insert(cpu).second) {
            doubled.push_back(thread);
        }
    }
    for (const int thread : doubled) {
        cpu_set_t open;
        const int n = sched_getaffinity(thread, sizeof(open), &open) == 0 ? CPU_SETSIZE : 0;
        for (int cpu = 0; cpu < n; cpu++) {
            if (CPU_ISSET(cpu, &open) && taken.insert(cpu).second) {
                moves += move_to(thread, cpu, open);
                break;
            }
        }
    }
}

#else

bool spac_team_watch::read_times(std::vector<times> &) const {
    return false;
}

void spac_team_watch::spread() {}

#endif

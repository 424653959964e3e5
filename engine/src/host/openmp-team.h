// The team of OpenMP threads that ggml leaves behind on a thread that computed a graph.
#pragma once

#include <vector>

// Ends the calling thread's team; the next graph makes a new one. Does nothing where ggml is built without OpenMP.
// GCC's OpenMP counts the threads of all teams and, when there are more than cores, lets none of them wait awake: the host
// executor's would sleep in each of ggml's barriers while the team of the last prompt stands idle.
void spac_end_openmp_team();

// The system's numbers of the n threads that compute the calling thread's next graph of so many, itself first: made now if
// they are not there. Fewer where ggml is built without OpenMP, or the system has no more.
std::vector<int> spac_openmp_threads(int n);

int spac_thread_id(); // the calling thread's; 0 where threads have none

// The cores of this machine that threads may run on. Linux only: elsewhere there is none to ask for.
#pragma once

#include <thread>
#include <vector>

// open to the calling thread, ascending; throws where the system does not say
std::vector<int> spac_open_cpus();

// the calling thread runs only there afterwards; if that fails, the log says so, and it runs where it did
void spac_pin_thread(std::thread & thread, int cpu);

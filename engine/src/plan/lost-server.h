// What is said when an RPC server goes away: ggml's RPC backend then aborts the process, whoever asked it for something.
#pragma once

#include <string>

// from now on, instead of ggml's backtrace: which servers there were, and what to do; the process ends with status 1
// endpoint: HOST:PORT of one of them
void spac_name_lost_server(const std::string & endpoint);

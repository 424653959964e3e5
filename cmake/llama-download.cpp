// llama.cpp's `llama download` as a program of its own

int llama_download(int argc, char ** argv);

int main(int argc, char ** argv) {
    return llama_download(argc, argv);
}

/* Moving many pages between device tensors in host memory and rows with one call, past the cache where that is wanted.
 *
 * It plans nothing: row_copy.py says which pages, and copies with numpy where this could not be compiled. Writing a line
 * of memory the usual way reads it first. A copy of pages that nobody reads soon needs only two thirds of the traffic
 * when its writes bypass the cache, and leaves the cache to the engine.
 *
 * Only Python's stable interface of 3.11 is used, so one compiled module serves later versions too.
 */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdint.h>
#include <string.h>

#define LINE_BYTES 64

/* A page's place: which device block, which slot, which part of the slot. */
typedef struct {
    int64_t block, slot, sub_block;
} Place;

typedef void (*CopyPage)(char *target, const char *source, size_t num_bytes);

static void copy_cached(char *target, const char *source, size_t num_bytes)
{
    memcpy(target, source, num_bytes);
}

#ifdef __SSE2__
#include <emmintrin.h>

/* Bytes that are copied from this many places in turn: one place at a time leaves a core waiting for memory. A processor
 * foresees reads only within a page of 4 KiB of memory, so the places are as far apart. */
#define NUM_STRANDS 4
#define STRAND_BYTES 4096
#define TURN_BYTES (4 * LINE_BYTES)

/* Whole lines; the target begins with one. */
static void stream_lines(char *target, const char *source, size_t num_bytes)
{
    for (size_t at = 0; at < num_bytes; at += LINE_BYTES) {
        const __m128i *from = (const __m128i *)(source + at);
        __m128i *to = (__m128i *)(target + at);
        __m128i first = _mm_loadu_si128(from), second = _mm_loadu_si128(from + 1);
        __m128i third = _mm_loadu_si128(from + 2), fourth = _mm_loadu_si128(from + 3);
        _mm_stream_si128(to, first);
        _mm_stream_si128(to + 1, second);
        _mm_stream_si128(to + 2, third);
        _mm_stream_si128(to + 3, fourth);
    }
}

static void stream_strands(char *target, const char *source)
{
    for (size_t turn = 0; turn < STRAND_BYTES; turn += TURN_BYTES)
        for (size_t at = turn; at < NUM_STRANDS * STRAND_BYTES; at += STRAND_BYTES)
            stream_lines(target + at, source + at, TURN_BYTES);
}

static void copy_past_cache(char *target, const char *source, size_t num_bytes)
{
    size_t head = (size_t)(-(uintptr_t)target & (LINE_BYTES - 1));
    if (head > num_bytes)
        head = num_bytes;
    memcpy(target, source, head);
    size_t at = head;
    for (; num_bytes - at >= NUM_STRANDS * STRAND_BYTES; at += NUM_STRANDS * STRAND_BYTES)
        stream_strands(target + at, source + at);
    size_t rest = (num_bytes - at) & ~(size_t)(LINE_BYTES - 1);
    stream_lines(target + at, source + at, rest);
    at += rest;
    memcpy(target + at, source + at, num_bytes - at);
}

/* Writes past the cache are weakly ordered: whoever is told that the bytes are there must find them. */
static void finish_past_cache(void)
{
    _mm_sfence();
}
#else
#define copy_past_cache copy_cached

static void finish_past_cache(void)
{
}
#endif

/* Takes a view of a matrix of bytes whose rows have no gaps; on failure an exception is set and nothing is held. */
static int take_matrix(PyObject *array, Py_buffer *view, int is_written, const char *name)
{
    if (PyObject_GetBuffer(array, view, PyBUF_STRIDES | (is_written ? PyBUF_WRITABLE : 0)) < 0)
        return -1;
    if (view->ndim == 2 && view->itemsize == 1 && (view->strides[1] == 1 || view->shape[1] <= 1))
        return 0;
    PyErr_Format(PyExc_ValueError, "%s must have two dimensions of bytes, the last without gaps", name);
    PyBuffer_Release(view);
    return -1;
}

/* Refuses a place outside of the pages or rows, before anything is copied. */
static int check_places(const Place *places, Py_ssize_t num_places, const Py_buffer *pages, const Py_buffer *rows,
                        Py_ssize_t num_sub_blocks)
{
    for (Py_ssize_t i = 0; i < num_places; i++) {
        const Place *place = &places[i];
        if (place->block < 0 || place->block >= pages->shape[0] || place->slot < 0 || place->slot >= rows->shape[0] ||
            place->sub_block < 0 || place->sub_block >= num_sub_blocks) {
            PyErr_Format(PyExc_IndexError, "block %lld or part %lld of slot %lld is outside of pages or rows",
                         (long long)place->block, (long long)place->sub_block, (long long)place->slot);
            return -1;
        }
    }
    return 0;
}

static void move_all(const Place *places, Py_ssize_t num_places, const Py_buffer *pages, const Py_buffer *rows,
                     int to_rows, CopyPage copy)
{
    Py_ssize_t page_bytes = pages->shape[1];
    for (Py_ssize_t i = 0; i < num_places; i++) {
        char *page = (char *)pages->buf + places[i].block * pages->strides[0];
        char *part = (char *)rows->buf + places[i].slot * rows->strides[0] + places[i].sub_block * page_bytes;
        copy(to_rows ? part : page, to_rows ? page : part, (size_t)page_bytes);
    }
}

static int move_viewed(const Py_buffer *pages, const Py_buffer *rows, const Py_buffer *moves, int to_rows,
                       int is_past_cache)
{
    Py_ssize_t page_bytes = pages->shape[1];
    if (page_bytes == 0 || rows->shape[1] % page_bytes != 0) {
        PyErr_Format(PyExc_ValueError, "rows of %zd bytes are not made of pages of %zd", rows->shape[1], page_bytes);
        return -1;
    }
    int is_int64 = moves->itemsize == (Py_ssize_t)sizeof(int64_t) && moves->format != NULL &&
                   (strcmp(moves->format, "l") == 0 || strcmp(moves->format, "q") == 0);
    if (!is_int64 || moves->len % (Py_ssize_t)sizeof(Place) != 0 || (uintptr_t)moves->buf % _Alignof(Place) != 0) {
        PyErr_SetString(PyExc_ValueError, "moves must be block, slot and sub-block of each page, int64");
        return -1;
    }
    const Place *places = moves->buf;
    Py_ssize_t num_places = moves->len / (Py_ssize_t)sizeof(Place);
    if (check_places(places, num_places, pages, rows, rows->shape[1] / page_bytes) < 0)
        return -1;
    Py_BEGIN_ALLOW_THREADS
    move_all(places, num_places, pages, rows, to_rows, is_past_cache ? copy_past_cache : copy_cached);
    if (is_past_cache)
        finish_past_cache();
    Py_END_ALLOW_THREADS
    return 0;
}

static PyObject *move_pages(PyObject *module, PyObject *args)
{
    PyObject *pages_object, *rows_object, *moves_object;
    int to_rows, is_past_cache, result = -1;
    Py_buffer pages, rows, moves;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOpp", &pages_object, &rows_object, &moves_object, &to_rows, &is_past_cache))
        return NULL;
    if (take_matrix(pages_object, &pages, !to_rows, "pages") < 0)
        return NULL;
    if (take_matrix(rows_object, &rows, to_rows, "rows") == 0) {
        if (PyObject_GetBuffer(moves_object, &moves, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) == 0) {
            result = move_viewed(&pages, &rows, &moves, to_rows, is_past_cache);
            PyBuffer_Release(&moves);
        }
        PyBuffer_Release(&rows);
    }
    PyBuffer_Release(&pages);
    if (result < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"move_pages", move_pages, METH_VARARGS, "Copy pages to their places in rows, or back."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_page_copy",
    .m_doc = "Moving many pages between device tensors in host memory and rows.",
    .m_size = 0,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__page_copy(void)
{
    return PyModule_Create(&definition);
}

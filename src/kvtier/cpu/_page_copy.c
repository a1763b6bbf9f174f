/* Moving many pages between device tensors in host memory and rows with one call, past the cache where that is wanted.
 *
 * Threads that make the same call with the same counter share the work without meeting at the interpreter's lock: each
 * time they met there, one was woken on the other's core and waited for it, while its own stood idle.
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

/* A page's place: which device block, which slot, which sub-block of the slot. */
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

/* Writes past the cache are weakly ordered: a thread that learns that the bytes are there must find them. */
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
            PyErr_Format(PyExc_IndexError, "block %lld or sub-block %lld of slot %lld is outside of pages or rows",
                         (long long)place->block, (long long)place->sub_block, (long long)place->slot);
            return -1;
        }
    }
    return 0;
}

/* The pages of one tensor that move, with views that keep everything alive, cut into tasks of some pages. */
typedef struct {
    Py_buffer pages, rows, moves;
    int is_past_cache;
    Py_ssize_t task_pages;
    int64_t end_task; /* number of the first task behind this tensor's */
} Share;

typedef struct {
    Share *shares;
    Py_ssize_t num_shares;
} Transfer;

static Py_ssize_t count_places(const Share *share)
{
    return share->moves.len / (Py_ssize_t)sizeof(Place);
}

static void move_task(const Share *share, Py_ssize_t first, Py_ssize_t end, int to_rows)
{
    const Place *places = share->moves.buf;
    CopyPage copy = share->is_past_cache ? copy_past_cache : copy_cached;
    Py_ssize_t page_bytes = share->pages.shape[1];
    for (const Place *place = places + first; place < places + end; place++) {
        char *page = (char *)share->pages.buf + place->block * share->pages.strides[0];
        char *in_row = (char *)share->rows.buf + place->slot * share->rows.strides[0] + place->sub_block * page_bytes;
        copy(to_rows ? in_row : page, to_rows ? page : in_row, (size_t)page_bytes);
    }
}

/* Takes task after task until none is left; threads that share the counter take the others. */
static void work_off(const Transfer *transfer, int64_t *turn, int to_rows)
{
    const Share *share = transfer->shares, *end = share + transfer->num_shares;
    int64_t first_task = 0;
    for (;;) {
        int64_t task = __atomic_fetch_add(turn, 1, __ATOMIC_RELAXED);
        for (; share < end && task >= share->end_task; share++)
            first_task = share->end_task;
        if (share == end || task < first_task)
            break;
        Py_ssize_t first = (Py_ssize_t)(task - first_task) * share->task_pages, num_places = count_places(share);
        Py_ssize_t rest = num_places - first;
        move_task(share, first, first + (rest < share->task_pages ? rest : share->task_pages), to_rows);
    }
    finish_past_cache();
}

static int check_share(const Share *share)
{
    Py_ssize_t page_bytes = share->pages.shape[1];
    if (page_bytes == 0 || share->rows.shape[1] % page_bytes != 0) {
        PyErr_Format(PyExc_ValueError, "rows of %zd bytes are not made of pages of %zd", share->rows.shape[1],
                     page_bytes);
        return -1;
    }
    const Py_buffer *moves = &share->moves;
    int is_int64 = moves->itemsize == (Py_ssize_t)sizeof(int64_t) && moves->format != NULL &&
                   (strcmp(moves->format, "l") == 0 || strcmp(moves->format, "q") == 0);
    if (!is_int64 || moves->len % (Py_ssize_t)sizeof(Place) != 0 || (uintptr_t)moves->buf % _Alignof(Place) != 0) {
        PyErr_SetString(PyExc_ValueError, "moves must be block, slot and sub-block of each page, int64");
        return -1;
    }
    return check_places(moves->buf, count_places(share), &share->pages, &share->rows,
                        share->rows.shape[1] / page_bytes);
}

static void release_share(Share *share)
{
    PyBuffer_Release(&share->moves);
    PyBuffer_Release(&share->rows);
    PyBuffer_Release(&share->pages);
}

/* Takes views of a tensor's pages, rows and moves; on failure an exception is set and nothing is held. */
static int take_share(Share *share, PyObject *item, int to_rows)
{
    PyObject *pages, *rows, *moves;
    if (!PyTuple_Check(item)) {
        PyErr_SetString(PyExc_TypeError, "a share must be a tuple of pages, rows, moves and a flag");
        return -1;
    }
    if (!PyArg_ParseTuple(item, "OOOp", &pages, &rows, &moves, &share->is_past_cache))
        return -1;
    if (take_matrix(pages, &share->pages, !to_rows, "pages") < 0)
        return -1;
    if (take_matrix(rows, &share->rows, to_rows, "rows") < 0) {
        PyBuffer_Release(&share->pages);
        return -1;
    }
    if (PyObject_GetBuffer(moves, &share->moves, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) < 0) {
        PyBuffer_Release(&share->rows);
        PyBuffer_Release(&share->pages);
        return -1;
    }
    if (check_share(share) == 0)
        return 0;
    release_share(share);
    return -1;
}

static void release_transfer(Transfer *transfer)
{
    while (transfer->num_shares > 0)
        release_share(&transfer->shares[--transfer->num_shares]);
    PyMem_Free(transfer->shares);
}

/* Takes every share and numbers their tasks; on failure an exception is set and nothing is held. */
static int take_transfer(Transfer *transfer, PyObject *items, Py_ssize_t task_bytes, int to_rows)
{
    Py_ssize_t num_items = PySequence_Size(items);
    if (num_items < 0)
        return -1;
    transfer->num_shares = 0;
    transfer->shares = PyMem_Calloc((size_t)num_items + 1, sizeof(Share));
    if (transfer->shares == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    int64_t end_task = 0;
    for (Py_ssize_t i = 0; i < num_items; i++) {
        Share *share = &transfer->shares[i];
        PyObject *item = PySequence_GetItem(items, i);
        int failed = item == NULL || take_share(share, item, to_rows) < 0;
        Py_XDECREF(item);
        if (failed) {
            release_transfer(transfer);
            return -1;
        }
        Py_ssize_t task_pages = task_bytes / share->pages.shape[1], num_places = count_places(share);
        share->task_pages = task_pages > 0 ? task_pages : 1;
        end_task += num_places / share->task_pages + (num_places % share->task_pages != 0);
        share->end_task = end_task;
        transfer->num_shares++;
    }
    return 0;
}

static int take_turn(PyObject *object, Py_buffer *turn)
{
    if (PyObject_GetBuffer(object, turn, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0)
        return -1;
    if (turn->len == (Py_ssize_t)sizeof(int64_t) && (uintptr_t)turn->buf % _Alignof(int64_t) == 0)
        return 0;
    PyErr_SetString(PyExc_ValueError, "the turn must be one int64");
    PyBuffer_Release(turn);
    return -1;
}

static PyObject *move_pages(PyObject *module, PyObject *args)
{
    PyObject *items, *turn_object;
    Py_ssize_t task_bytes;
    int to_rows;
    Py_buffer turn;
    Transfer transfer;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOnp", &items, &turn_object, &task_bytes, &to_rows))
        return NULL;
    if (take_turn(turn_object, &turn) < 0)
        return NULL;
    int failed = take_transfer(&transfer, items, task_bytes, to_rows) < 0;
    if (!failed) {
        Py_BEGIN_ALLOW_THREADS
        work_off(&transfer, turn.buf, to_rows);
        Py_END_ALLOW_THREADS
        release_transfer(&transfer);
    }
    PyBuffer_Release(&turn);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"move_pages", move_pages, METH_VARARGS, "Copy pages to their places in rows, or back, sharing the work."},
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

/* millrace-actor devices: what GPUs there are, as one JSON object on stdout.  The supervisor's side never links CUDA, so `check` and `doctor`
 * run this in a process that is gone before anything starts. */
#include <jansson.h>
#include <stdio.h>

#include "actors/actors.h"
#include "kernels/kernels.h"

static json_t *describe(const struct mr_k_cuda_device *d, int n)
{
    json_t *o = json_object(), *peers = json_array();

    for (int j = 0; j < n; j++)
        json_array_append_new(peers, json_integer(d->peer[j]));
    json_object_set_new(o, "name", json_string(d->name));
    json_object_set_new(o, "uuid", json_string(d->uuid));
    json_object_set_new(o, "free", json_integer((json_int_t)d->free_bytes));
    json_object_set_new(o, "total", json_integer((json_int_t)d->total_bytes));
    json_object_set_new(o, "major", json_integer(d->major));
    json_object_set_new(o, "minor", json_integer(d->minor));
    json_object_set_new(o, "sms", json_integer(d->sms));
    json_object_set_new(o, "peers", peers);
    return o;
}

int mr_devices_main(int argc, char **argv)
{
    struct mr_k_cuda_device d[MR_K_CUDA_DEVICES];
    json_t *o = json_object(), *list = json_array();
    char why[512] = "";
    int n = 0, rc;

    (void)argv;
    if (argc > 2)
        return MR_EXIT_CONFIG;
    rc = mr_k_cuda_devices(d, &n, why, sizeof why);
    for (int i = 0; i < n && !rc; i++)
        json_array_append_new(list, describe(&d[i], n));
    json_object_set_new(o, "devices", list);
    json_object_set_new(o, "nccl", json_integer(mr_k_comm_version()));
    if (rc)
        json_object_set_new(o, "error", json_string(why));
    json_dumpf(o, stdout, JSON_COMPACT);
    printf("\n");
    json_decref(o);
    return rc ? MR_EXIT_ENV : MR_EXIT_OK;
}

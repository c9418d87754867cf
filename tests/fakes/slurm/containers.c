/* A stand-in for pyxis: its options of srun, and a task that sees nothing in one folder but what
 * is mounted, starts in a folder of the image's, and finds the image's programs first.
 *
 * The image is a folder; what is hidden is the plugin's argument in plugstack.conf.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <slurm/spank.h>

SPANK_PLUGIN(containers, 1)

#define MOST 8

static char asked[3][4 * PATH_MAX];
enum { IMAGE, MOUNTS, WORKDIR };

static int take(int which, const char *value, int remote)
{
	/* As pyxis: other than mounts, nothing is said twice. */
	if (which != MOUNTS && *asked[which] && strcmp(asked[which], value) != 0) {
		slurm_error("containers: specified multiple times: %s", value);
		return -1;
	}
	snprintf(asked[which], sizeof asked[which], "%s", value);
	return 0;
}

static struct spank_option options[] = {
	{ "container-image", "IMAGE", "image", 1, IMAGE, take },
	{ "container-mounts", "SRC:DST", "mounts", 1, MOUNTS, take },
	{ "container-workdir", "PATH", "working directory", 1, WORKDIR, take },
	SPANK_OPTIONS_TABLE_END
};

int slurm_spank_init(spank_t sp, int count, char **args)
{
	for (struct spank_option *each = options; each->name; each++)
		if (spank_option_register(sp, each) != ESPANK_SUCCESS)
			return -1;
	return 0;
}

static void make_folders(const char *path)
{
	char text[PATH_MAX];
	snprintf(text, sizeof text, "%s", path);
	for (char *at = text + 1; *at; at++)
		if (*at == '/') {
			*at = 0;
			mkdir(text, 0755);
			*at = '/';
		}
	mkdir(text, 0755);
}

static int fail(const char *what)
{
	slurm_error("containers: %s: %m", what);
	return -1;
}

int slurm_spank_task_init(spank_t sp, int count, char **args)
{
	char path[5 * PATH_MAX], from[PATH_MAX], *targets[MOST], *rest = NULL;
	int sources[MOST], mounts = 0;

	if (!*asked[IMAGE])
		return 0;
	if (unshare(CLONE_NEWNS) || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL))
		return fail("unshare");
	char *each = strtok_r(asked[MOUNTS], ",", &rest);
	for (; each && mounts < MOST; each = strtok_r(NULL, ",", &rest), mounts++) {
		char *colon = strchr(each, ':');
		if (colon)
			*colon = 0;
		targets[mounts] = colon ? colon + 1 : each;
		if ((sources[mounts] = open(each, O_PATH | O_CLOEXEC)) < 0)
			return fail(each);
	}
	if (mount("none", args[0], "tmpfs", 0, NULL))
		return fail(args[0]);
	for (int i = 0; i < mounts; i++) {
		make_folders(targets[i]);
		snprintf(from, sizeof from, "/proc/self/fd/%d", sources[i]);
		if (mount(from, targets[i], NULL, MS_BIND | MS_REC, NULL))
			return fail(targets[i]);
	}
	if (chdir(*asked[WORKDIR] ? asked[WORKDIR] : asked[IMAGE]))
		return fail(asked[WORKDIR]);
	snprintf(path, sizeof path, "%s/bin:/usr/bin:/bin", asked[IMAGE]);
	return spank_setenv(sp, "PATH", path, 1) == ESPANK_SUCCESS ? 0 : fail("PATH");
}

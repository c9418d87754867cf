"""A spawned child sends back an object of a class of this program."""

import multiprocessing


class Point:
    x = 1


def work(results):
    results.put(Point())


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    child = context.Process(target=work, args=(results,))
    child.start()
    print(results.get().x)
    child.join()

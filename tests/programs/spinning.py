import os
import time

print("spinning", os.environ["RANK"], flush=True)
steps = 0
while not os.path.exists(os.environ["STOP_FILE"]):
    steps += 1
    time.sleep(0.01)
print("stopped", os.environ["RANK"])

-- Gives a job the data of another enqueue. A held job stays held. Assignments are made from left to right.
UPDATE multiq_jobs FORCE INDEX (PRIMARY)
SET `body` = {body}, priority = {priority}, ttr = {ttr}, token = 0, attempt = 0, crashes = 0, kicks = 0, reason = NULL,
    memo = NULL, detail = NULL, doomed = NULL, gates = {gates}, hold_delay = IF(state = 5, {hold_delay}, hold_delay),
    place = IF(state = 5, place, IF({delay} > 0, {now} + {delay}, {priority})),
    state = IF(state = 5, 5, IF({delay} > 0, 1, 4))
WHERE seq = {seq}

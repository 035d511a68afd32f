-- remove.sql explains the form and the last condition.
DELETE note FROM multiq_notes AS note FORCE INDEX (PRIMARY)
WHERE home = {home} AND name IN ({names}) AND version >= 0

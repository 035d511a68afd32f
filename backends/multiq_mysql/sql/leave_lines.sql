-- Runs after replace.sql if the job was parked. The job leaves its line. If the next reserve finds one of its gates
-- closed, the job gets into a line again.
DELETE line FROM multiq_lines AS line FORCE INDEX (multiq_lines_job) WHERE job = {seq}

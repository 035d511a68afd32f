INSERT INTO multiq_arrivals (job, member) VALUES ({row})
